"""Triton inference server in explicit model control mode: unloads models that no request uses.

An unload is answered before the memory is free, and frameworks keep a part of it.
"""

from __future__ import annotations

from urllib.parse import quote

from gpumond.facts.engines import EngineModel, EngineState
from gpumond.features.engines.settings import EngineConfig
from gpumond.features.engines.spec import (
    Dialogue,
    EngineSpec,
    Metrics,
    ReleaseMethod,
    at,
    entries,
    get,
    load,
    name_of,
    post,
    selected,
    unloads,
)

PENDING, DONE = "nv_inference_pending_request_count", ("nv_inference_request_success", "nv_inference_request_failure")


def read(engine: EngineConfig) -> Dialogue[EngineState]:
    """Read the index and the metrics. The pending requests exclude the running ones, of which only the end is seen."""
    index = (yield post("/v2/repository/index", {})).accepted().json
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


def check(engine: EngineConfig, state: EngineState) -> Dialogue[str]:
    """Refuse without the pending requests, and for a model that an ensemble uses which stays."""
    if engine.metrics_address is None:
        return "its pending requests are unknown: declare metrics_url, such as http://127.0.0.1:8002"
    models = [model.name for model in selected(engine, state)]
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


def undo(engine: EngineConfig, models: tuple[str, ...]) -> Dialogue[None]:
    yield from load({model: post(_path(model, "load"), {}) for model in reversed(models)})


def _path(model: str, action: str) -> str:
    return f"/v2/repository/models/{quote(model, safe='')}/{action}"


def mistake(engine: EngineConfig) -> str:
    if engine.models and engine.metrics_address:
        return ""
    return "allow requires models, those to unload, and metrics_url, for the pending requests"


SPEC = EngineSpec(
    kind="triton",
    summary="Triton inference server (--model-control-mode=explicit)",
    read=read,
    warning="requests for an unloaded model fail until it is loaded again, and frameworks keep a part of its memory",
    methods=(
        ReleaseMethod(
            name="unload",
            release=unloads(lambda model: post(_path(model.name, "unload"), {})),
            serves_again="gpumond flush --workload NAME --step engine --wake; until then requests for the models fail",
            undo=undo,
            check=check,
            stops_service=True,
            serves=lambda state, models: {*models} <= {model.name for model in state.models},
            settle_seconds=60.0,
        ),
    ),
    mistake=mistake,
)
