"""HTTP API of quotas: read, create or replace, delete."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Header, HTTPException, Request
from fastapi.responses import Response
from pydantic import TypeAdapter

from gpumond.features.quotas.registry import QuotaEntry, QuotaRegistry
from gpumond.features.quotas.settings import QuotaConfig
from gpumond.serve import examples
from gpumond.serve.dependencies import CHANGES, etag_of, kernel_of, require_rules
from gpumond.serve.problems import responses

router = APIRouter(prefix="/api/v1", tags=["quotas"])

BODY = {
    "name": "training",
    "match": {"workload": "train-*"},
    "soft_limit": 30 * examples.GIB,
    "limit": 40 * examples.GIB,
}
ENTRY = QuotaEntry("training", "api", "3b9d0c5f2a7d1e4c", BODY)
ENTRIES, ONE = TypeAdapter(list[QuotaEntry]), TypeAdapter(QuotaEntry)

IfMatch = Annotated[str | None, Header(description="The expected ETag of the quota; 412 if it has changed.")]


def _registry(request: Request) -> QuotaRegistry:
    return kernel_of(request).get(QuotaRegistry)


def _entry(entry: QuotaEntry) -> Response:
    headers = {"ETag": f'"{entry.etag}"', "Location": f"/api/v1/quotas/{entry.name}"}
    return Response(ONE.dump_json(entry), 200, headers, media_type="application/json")


@router.get("/quotas", summary="Quotas in effect, with their origin", **examples.described(list[QuotaEntry], [ENTRY]))
async def quotas(request: Request) -> Response:
    return Response(ENTRIES.dump_json(_registry(request).entries()), media_type="application/json")


@router.get("/quotas/{name}", summary="One quota, with its ETag", **examples.described(QuotaEntry, ENTRY, 404))
async def quota(request: Request, name: str) -> Response:
    return _entry(_registry(request).get(name))


@router.put(
    "/quotas/{name}",
    summary="Create or replace a quota",
    dependencies=CHANGES,
    **examples.described(QuotaEntry, ENTRY, 401, 403, 409, 412, 422, 503, 507),
)
async def replace(
    request: Request, name: str, body: QuotaConfig, if_match: IfMatch = None, by: str = Depends(require_rules)
) -> Response:
    """Takes effect within a tick: the limit is set in all programs that match and allow it.

    Requires the scope `rules`, as a change of a rule does. 409: the quota is defined in the configuration file.
    """
    if body.name != name:
        raise HTTPException(422, f"body.name: {body.name!r} differs from the name in the path, {name!r}")
    return _entry(await _registry(request).put(body.quota(), by, etag_of(if_match)))


@router.delete(
    "/quotas/{name}",
    summary="Delete a quota",
    dependencies=CHANGES,
    status_code=204,
    response_model=None,
    responses=responses(401, 403, 404, 409, 412, 503, 507),
)
async def remove(request: Request, name: str, if_match: IfMatch = None, by: str = Depends(require_rules)) -> Response:
    """Removes the limit from the programs in which this quota has set it."""
    await _registry(request).delete(name, by, etag_of(if_match))
    return Response(status_code=204)
