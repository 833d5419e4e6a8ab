"""llama.cpp's server as a router: each model has a child process, which ends when the model is unloaded.

The reads pass ``autoload=false``, without which they would load a model. ``/slots`` is not used: it wakes a model that
sleeps.
"""

from __future__ import annotations

from gpumond.engines.prometheus_text import Metrics
from gpumond.engines.spec import (
    Declaration,
    Dialogue,
    EngineSpec,
    Lever,
    all_of_it,
    at,
    entries,
    get,
    name_of,
    post,
    unknown_part,
)
from gpumond.model.engines import EngineModel, EngineState
from gpumond.model.pools import Expected


def read(engine: Declaration) -> Dialogue[EngineState]:
    listed = entries((yield get("/models")).accepted().json, "data")
    status = {name_of(at(each, "id")): at(each, "status", "value", kind=str) for each in listed if at(each, "id")}
    running: int | None = 0
    waiting: int | None = 0
    work: list[float | str] = []
    for name in (name for name, value in status.items() if value == "loaded"):
        answer = yield get("/metrics", model=name, autoload="false")
        page = Metrics(answer.text if answer.status == 200 else "")
        requests = page.count("llamacpp:requests_processing"), page.count("llamacpp:requests_deferred")
        running = None if running is None or requests[0] is None else running + requests[0]
        waiting = None if waiting is None or requests[1] is None else waiting + requests[1]
        counters = ("llamacpp:prompt_tokens_total", "llamacpp:tokens_predicted_total")
        work += [name, *(page.total(counter) or 0.0 for counter in counters)]
    loaded = tuple(EngineModel(name) for name, value in status.items() if value in ("loaded", "sleeping"))
    loading = [name for name, value in status.items() if value == "loading"]
    return EngineState(
        models=loaded,
        running=running,
        waiting=waiting,
        asleep=all(status[model.name] == "sleeping" for model in loaded) if loaded else None,
        held_bytes=None if loaded or loading else 0,
        work=tuple(work),
        obstacle=f"{', '.join(loading)}: the model is being loaded" if loading else "",
    )


def releasable(engine: Declaration, state: EngineState) -> tuple[str, ...]:
    return tuple(model.name for model in state.models if not engine.models or model.name in engine.models)


def check(engine: Declaration, state: EngineState) -> Dialogue[str]:
    yield from ()
    return "" if releasable(engine, state) or not state.models else "none of the declared models is loaded"


def release(engine: Declaration, state: EngineState) -> Dialogue[tuple[str, ...]]:
    models = releasable(engine, state)
    for model in models:
        (yield post("/models/unload", {"model": model})).accepted()
    return models


def undo(engine: Declaration, models: tuple[str, ...]) -> Dialogue[None]:
    for model in models:
        (yield post("/models/load", {"model": model})).accepted()


def estimate(engine: Declaration, state: EngineState, used: int) -> Expected:
    all_go = len(releasable(engine, state)) == len(state.models)
    return (all_of_it if all_go else unknown_part)(engine, state, used)


SPEC = EngineSpec(
    kind="llama-router",
    summary="llama.cpp's server, started as a router (without a model)",
    read=read,
    levers=(
        Lever(
            name="unload",
            release=release,
            serves_again="the next request loads the model again, unless the router runs with --no-models-autoload",
            estimate=estimate,
            undo=undo,
            check=check,
            ends_holder=True,
            settle_seconds=20.0,
        ),
    ),
)
