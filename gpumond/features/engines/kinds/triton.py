"""Triton inference server in explicit model control mode: unloads models that no request uses.

An unload is answered before the memory is free, and frameworks keep a part of it.
"""

from __future__ import annotations

from urllib.parse import quote

from gpumond.facts.engines import EngineModel, EngineState
from gpumond.facts.errors import EngineError
from gpumond.features.engines.prometheus_text import Metrics
from gpumond.features.engines.spec import (
    Call,
    Declaration,
    Dialogue,
    EngineSpec,
    Lever,
    at,
    entries,
    get,
    name_of,
    post,
    unknown_part,
)

PENDING, DONE = "nv_inference_pending_request_count", ("nv_inference_request_success", "nv_inference_request_failure")


def read(engine: Declaration) -> Dialogue[EngineState]:
    """Read the index and the metrics. The pending requests exclude the running ones, of which only the end is seen."""
    index = (yield _index()).accepted().json
    listed = [entry for entry in entries([index], 0) if at(entry, "name", kind=str)]
    ready = [name_of(entry["name"]) for entry in listed if at(entry, "state") == "READY"]
    busy = [name_of(entry["name"]) for entry in listed if at(entry, "state") in ("LOADING", "UNLOADING")]
    waiting, work = None, None
    if engine.metrics_address is not None:
        page = Metrics((yield get("/metrics", of_metrics=True)).accepted().body)
        waiting = page.count(PENDING)
        work = page.counters(*DONE)
    return EngineState(
        models=tuple(EngineModel(name) for name in dict.fromkeys(ready)),
        waiting=waiting,
        work=work,
        obstacle=f"{', '.join(busy)}: being loaded or unloaded" if busy else "",
    )


def _index() -> Call:
    return Call(method="POST", path="/v2/repository/index", body={})


def releasable(engine: Declaration, state: EngineState) -> tuple[str, ...]:
    return tuple(model.name for model in state.models if model.name in engine.models)


def check(engine: Declaration, state: EngineState) -> Dialogue[str]:
    """Refuse without the pending requests, and for a model that an ensemble uses which stays."""
    if engine.metrics_address is None:
        return "its pending requests are unknown: declare metrics_url, such as http://127.0.0.1:8002"
    models = releasable(engine, state)
    if not models:
        return "none of the declared models is ready: list the models to unload under models:"
    for model in state.models:
        if model.name not in models:
            answer = yield get(f"/v2/models/{quote(model.name, safe='')}/config")
            steps = entries(answer.json, "ensemble_scheduling", "step") if answer.status == 200 else []
            used = [name for step in steps if (name := at(step, "model_name")) in models]
            if used:
                return f"the ensemble {model.name} uses {used[0]}: declare both, or neither"
    return ""


def release(engine: Declaration, state: EngineState) -> Dialogue[tuple[str, ...]]:
    models = releasable(engine, state)
    for model in models:
        (yield post(f"/v2/repository/models/{quote(model, safe='')}/unload", {})).accepted()
    return models


def undo(engine: Declaration, models: tuple[str, ...]) -> Dialogue[None]:
    failed = []
    for model in reversed(models):
        if (yield post(f"/v2/repository/models/{quote(model, safe='')}/load", {})).status != 200:
            failed.append(model)
    if failed:
        raise EngineError(f"{', '.join(failed)}: not loaded; see the log of the server")


SPEC = EngineSpec(
    kind="triton",
    summary="Triton inference server (--model-control-mode=explicit)",
    read=read,
    warning="requests for an unloaded model fail until it is loaded again, and frameworks keep a part of its memory",
    levers=(
        Lever(
            name="unload",
            release=release,
            serves_again="gpumond flush --workload NAME --step engine --wake; until then requests for the models fail",
            estimate=unknown_part,
            undo=undo,
            check=check,
            stops_service=True,
            serves=lambda state, models: {*models} <= {model.name for model in state.models},
            settle_seconds=60.0,
        ),
    ),
)
