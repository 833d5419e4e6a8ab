"""llama.cpp's server as a router: each model has a child process, which ends when the model is unloaded.

The reads pass ``autoload=false``, without which they would load a model. ``/slots`` is not used: it wakes a model that
sleeps. A read of the metrics begins a new period of the server's own throughput averages.
"""

from __future__ import annotations

from gpumond.facts.engines import EngineModel, EngineState
from gpumond.facts.errors import EngineError
from gpumond.facts.pools import Expected
from gpumond.features.engines.prometheus_text import Metrics
from gpumond.features.engines.spec import (
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


def read(engine: Declaration) -> Dialogue[EngineState]:
    listed = [each for each in entries((yield get("/models")).accepted().json, "data") if at(each, "id", kind=str)]
    status = {name_of(each["id"]): at(each, "status", "value", kind=str) for each in listed}
    aliases = {name_of(each["id"]): tuple(map(name_of, entries(each, "aliases"))) for each in listed}
    running: int | None = 0
    waiting: int | None = 0
    work: list[float | str] | None = []
    without_counts = ""
    for name in (name for name, value in status.items() if value == "loaded"):
        answer = yield get("/metrics", model=name, autoload="false")
        if answer.status in (401, 403):
            answer.accepted()
        if answer.status == 501:
            without_counts = "start the router with --metrics"
        page = Metrics(answer.body if answer.status == 200 else b"")
        requests = page.count("llamacpp:requests_processing"), page.count("llamacpp:requests_deferred")
        running = None if running is None or requests[0] is None else running + requests[0]
        waiting = None if waiting is None or requests[1] is None else waiting + requests[1]
        counters = page.counters("llamacpp:prompt_tokens_total", "llamacpp:tokens_predicted_total")
        work = None if work is None or counters is None else [*work, name, *counters]
    loaded = tuple(
        EngineModel(name, aliases=aliases[name]) for name, value in status.items() if value in ("loaded", "sleeping")
    )
    loading = [name for name, value in status.items() if value == "loading"]
    return EngineState(
        models=loaded,
        running=running,
        waiting=waiting,
        asleep=all(status[model.name] == "sleeping" for model in loaded) if loaded else None,
        held_bytes=None if loaded or loading else 0,
        work=None if work is None else tuple(work),
        obstacle=f"{', '.join(loading)}: the model is being loaded" if loading else "",
        without_counts=without_counts,
    )


def releasable(engine: Declaration, state: EngineState) -> tuple[str, ...]:
    names = set(engine.models)
    return tuple(model.name for model in state.models if not names or names & {model.name, *model.aliases})


def check(engine: Declaration, state: EngineState) -> Dialogue[str]:
    yield from ()
    return "" if releasable(engine, state) or not state.models else "none of the declared models is loaded"


def release(engine: Declaration, state: EngineState) -> Dialogue[tuple[str, ...]]:
    models = releasable(engine, state)
    for model in models:
        (yield post("/models/unload", {"model": model})).accepted()
    return models


def undo(engine: Declaration, models: tuple[str, ...]) -> Dialogue[None]:
    """Load the models that no request has loaded yet."""
    listed = entries((yield get("/models")).accepted().json, "data")
    present = {at(each, "id") for each in listed if at(each, "status", "value") in ("loaded", "loading", "sleeping")}
    failed = []
    for model in models:
        if model not in present:
            answer = yield post("/models/load", {"model": model})
            if answer.status != 200 and b"already" not in answer.body:  # a request was faster
                failed.append(model)
    if failed:
        raise EngineError(f"{', '.join(failed)}: not loaded; see the log of the server")


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
