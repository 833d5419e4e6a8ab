"""HTTP API of baselines: record, read, compare and delete."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from fastapi import Depends, Path, Query, Request
from fastapi.responses import Response
from pydantic import ConfigDict, Field

from gpumond.config.models import EncodableModel
from gpumond.facts.units import DAY_SECONDS, GIB
from gpumond.features.baselines.recorder import BaselineService
from gpumond.features.baselines.statistics import (
    NAME_PATTERN,
    Baseline,
    Comparison,
    Difference,
    Distribution,
    MeasureDistribution,
    WorkloadMeasures,
)
from gpumond.serve import examples
from gpumond.serve.authorization import require_rules
from gpumond.serve.routes import Router, core_of, json_response

router = Router("baselines")

Name = Annotated[
    str, Path(pattern=f"^{NAME_PATTERN}$", description="1 to 64 characters from A-Z, a-z, 0-9, ., _ and -")
]
Other = Annotated[
    str | None,
    Query(
        alias="with", pattern=f"^{NAME_PATTERN}$", description="Name of the other baseline; without it, the measurement"
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineEntry:
    """One baseline without its distributions. ``complete`` is false while it is being recorded."""

    name: str
    workload: str | None
    started_at: float
    for_seconds: float
    seconds: float
    complete: bool
    workloads: tuple[str, ...]


class RecordBody(EncodableModel):
    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"for_seconds": 600, "workload": "train"}]}
    )

    for_seconds: float = Field(ge=1, le=DAY_SECONDS)
    workload: str | None = Field(default=None, min_length=1, max_length=256)


class CompareBody(EncodableModel):
    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"for_seconds": 600}]})

    for_seconds: float = Field(ge=1, le=DAY_SECONDS)


LEVELS = (31.0 * GIB, 30.5 * GIB, 31.0 * GIB)
LIVE = MeasureDistribution("live", Distribution(34.0 * GIB, 31.0 * GIB, 30.5 * GIB, 31.0 * GIB, LEVELS))
EXAMPLE = Baseline(
    "nightly", "train", examples.TAKEN_AT, 600.0, 600.0, True, (WorkloadMeasures("train", 600.0, (LIVE,), 3, 1),)
)
STARTED_EXAMPLE = replace(EXAMPLE, seconds=0.0, complete=False, workloads=())


def _entry(baseline: Baseline) -> BaselineEntry:
    names = ("name", "workload", "started_at", "for_seconds", "seconds", "complete")
    workloads = tuple(each.workload for each in baseline.workloads)
    return BaselineEntry(workloads=workloads, **{name: getattr(baseline, name) for name in names})


EXAMPLE_COMPARISON = Comparison(
    "nightly",
    examples.TAKEN_AT,
    examples.TAKEN_AT + 86400,
    600.0,
    600.0,
    True,
    (Difference("train", "live", "typical", 31.0 * GIB, 34.1 * GIB, 3.1 * GIB, 0.1, 2.9 * GIB, 3.3 * GIB),),
)


def _service(request: Request) -> BaselineService:
    return core_of(request).get(BaselineService)


@router.read("/baselines", "Baselines, including those in progress", list[BaselineEntry], [_entry(EXAMPLE)], (503, 507))
async def baselines(request: Request) -> Response:
    return json_response(list[BaselineEntry], [_entry(each) for each in await _service(request).baselines()])


@router.read("/baselines/{name}", "One baseline with its distributions", Baseline, EXAMPLE, (404, 422, 503, 507))
async def baseline(request: Request, name: Name) -> Response:
    return json_response(Baseline, await _service(request).get(name))


@router.change(
    "PUT /baselines/{name}", "Record a baseline", Baseline, STARTED_EXAMPLE, (409, 422, 503, 507), status=202
)
async def record(request: Request, name: Name, body: RecordBody, caller_name: str = Depends(require_rules)) -> Response:
    """Starts a recording and returns immediately. It replaces an existing baseline with this name at the end."""
    await _service(request).record(name, body.for_seconds, body.workload, caller_name)
    return json_response(Baseline, await _service(request).get(name), 202)


@router.deletion("/baselines/{name}", "Delete a baseline, or cancel its recording", (404, 422, 503, 507))
async def remove(request: Request, name: Name, caller_name: str = Depends(require_rules)) -> Response:
    await _service(request).delete(name, caller_name)
    return Response(status_code=204)


@router.change(
    "POST /baselines/{name}/compare",
    "Start a comparison with a baseline",
    Comparison,
    replace(EXAMPLE_COMPARISON, after_seconds=0.0, complete=False, differences=()),
    (404, 422, 503, 507),
    status=202,
)
async def measure_again(
    request: Request, name: Name, body: CompareBody, caller_name: str = Depends(require_rules)
) -> Response:
    """Starts a new measurement of the baseline's workloads and returns immediately."""
    await _service(request).measure_again(name, body.for_seconds, caller_name)
    return json_response(Comparison, await _service(request).comparison(name), 202)


@router.read(
    "/baselines/{name}/compare",
    "Comparison of a baseline with another baseline or the latest measurement",
    Comparison,
    EXAMPLE_COMPARISON,
    (404, 422, 503, 507),
)
async def comparison(request: Request, name: Name, other: Other = None) -> Response:
    return json_response(Comparison, await _service(request).comparison(name, other))
