"""HTTP API of cases of out-of-memory errors."""

from __future__ import annotations

from typing import Annotated

from fastapi import HTTPException, Path, Request
from fastapi.responses import Response

from gpumond.facts.program import Call, Oom, OomPool
from gpumond.features.oom.case import (
    CaseSummary,
    Curve,
    OomCase,
    RankedCase,
    Remedy,
    Timeline,
    html_document,
    summary_of,
)
from gpumond.features.oom.case_service import Cases
from gpumond.serve import examples
from gpumond.serve.resources import compressed_json
from gpumond.serve.routes import Router, core_of, json_response, problem_responses

router = Router("facts")

CaseId = Annotated[str, Path(max_length=64, description="The `id`, or `last`.")]

EXAMPLE = OomCase(
    id="1790000000-4242-1",
    at=examples.TAKEN_AT,
    pid=4242,
    start_ticks=examples.START_TICKS,
    workload="train",
    device_uuid=examples.UUID,
    gpu="0",
    summary="train (pid 4242) requested 10.0 GiB in `step` at train.py:31 on GPU 0, which had 1.0 GiB free. One change "
    "would have been enough: flush notebook (pid 17) with gpumond flush --pid 17; "
    "gpumond.agent.retry_on_oom(borrow=True) does this automatically",
    request_bytes=10 * examples.GIB,
    free_bytes=examples.GIB,
    missing_bytes=9 * examples.GIB,
    remedies=(
        Remedy(
            name="neighbor-cache",
            text="flush notebook (pid 17) with gpumond flush --pid 17; gpumond.agent.retry_on_oom(borrow=True) does "
            "this automatically",
            size_bytes=30 * examples.GIB,
            enough=True,
            basis="reported",
            source="agents of these programs",
        ),
    ),
    uid=1000,
    oom=Oom(
        number=1,
        at=examples.TAKEN_AT,
        seen="retry",
        device_uuid=examples.UUID,
        request_bytes=10 * examples.GIB,
        pools=(
            OomPool(
                allocator="torch",
                device_uuid=examples.UUID,
                live_bytes=31 * examples.GIB,
                cached_bytes=0,
                stranded_bytes=5 * examples.GIB,
            ),
        ),
        stack=(Call("train.py", 31, "step"),),
        free_bytes=examples.GIB,
        allocator="torch",
    ),
    lines=examples.LEDGER.lines,
    timeline=Timeline(
        (examples.TAKEN_AT - 5.0,), (Curve(pid=4242, workload="train", used_bytes=(38 * examples.GIB,)),)
    ),
)


@router.read("/oom", "Out-of-memory cases, most recent last", list[CaseSummary], [summary_of(EXAMPLE)])
async def cases(request: Request) -> Response:
    """Returns the latest 200, at most 10 per process, including those from before a restart."""
    return compressed_json(request, list[CaseSummary], [summary_of(case) for case in core_of(request).get(Cases).all()])


@router.read("/oom/{id}", "One case", RankedCase, RankedCase(case=EXAMPLE), (404, 422))
async def case(request: Request, id: CaseId) -> Response:
    """Returns what used the device's memory, and the remedies, the best first."""
    return json_response(RankedCase, _find_case(request, id))


@router.get(
    "/oom/{id}/report",
    summary="One case as an HTML document",
    response_class=Response,
    response_model=None,
    responses={
        200: {"content": {"text/html": {"schema": {"type": "string"}}}, "description": "The document"},
        **problem_responses(404, 422),
    },
)
async def report(request: Request, id: CaseId) -> Response:
    """Returns the document that `gpumond oom show ID --html` writes."""
    found = _find_case(request, id)
    headers = {
        "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
    return Response(html_document(found.case, found.ranks), 200, headers, media_type="text/html; charset=utf-8")


def _find_case(request: Request, id: str) -> RankedCase:
    cases = core_of(request).get(Cases)
    found = cases.find(id)
    if found is None:
        raise HTTPException(404, f"no case has the ID {id!r}; to list the cases: gpumond oom")
    return RankedCase(case=found, ranks=cases.rank_errors(found))
