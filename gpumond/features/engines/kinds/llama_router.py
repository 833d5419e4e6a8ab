"""llama.cpp's server as a router: each model has a child process, which ends when the model is unloaded.

The reads pass ``autoload=false``, without which they would load a model. ``/slots`` is not used: it wakes a model that
sleeps. A read of the metrics begins a new period of the server's own throughput averages.
"""

from __future__ import annotations

from collections.abc import Iterable

from gpumond.facts.engines import EngineModel, EngineState
from gpumond.features.engines.settings import EngineConfig
from gpumond.features.engines.spec import (
    Dialogue,
    EngineSpec,
    Metrics,
    ReleaseMethod,
    any_selected,
    at,
    entries,
    get,
    load,
    name_of,
    post,
    unloads,
)

REQUESTS = ("llamacpp:requests_processing", "llamacpp:requests_deferred")
WORK = ("llamacpp:prompt_tokens_total", "llamacpp:tokens_predicted_total")


def read(engine: EngineConfig) -> Dialogue[EngineState]:
    listed = [each for each in entries((yield get("/models")).accepted().json, "data") if at(each, "id", kind=str)]
    status = {name_of(entry["id"]): at(entry, "status", "value", kind=str) for entry in listed}
    aliases = {name_of(entry["id"]): tuple(map(name_of, entries(entry, "aliases"))) for entry in listed}
    counts: list[tuple[int | None, int | None]] = []
    work: list[float | str] | None = []
    without_counts = ""
    for name in (name for name, value in status.items() if value == "loaded"):
        answer = yield get("/metrics", model=name, autoload="false")
        if answer.status in (401, 403):
            answer.accepted()
        if answer.status == 501:
            without_counts = "start the router with --metrics"
        page = Metrics(answer.body if answer.status == 200 else b"")
        counts.append((page.count(REQUESTS[0]), page.count(REQUESTS[1])))
        counters = page.counters(*WORK)
        work = None if work is None or counters is None else [*work, name, *counters]
    loaded = tuple(
        EngineModel(name, aliases=aliases[name]) for name, value in status.items() if value in ("loaded", "sleeping")
    )
    loading = [name for name, value in status.items() if value == "loading"]
    return EngineState(
        models=loaded,
        running=_sum(running for running, _ in counts),
        waiting=_sum(waiting for _, waiting in counts),
        sleeping=all(status[model.name] == "sleeping" for model in loaded) if loaded else None,
        held_bytes=None if loaded or loading else 0,
        work=None if work is None else tuple(work),
        obstacle=f"{', '.join(loading)}: the model is being loaded" if loading else "",
        without_counts=without_counts,
    )


def _sum(counts: Iterable[int | None]) -> int | None:
    """Return the sum; None if one of the counts is unknown."""
    total = 0
    for count in counts:
        if count is None:
            return None
        total += count
    return total


def undo(engine: EngineConfig, models: tuple[str, ...]) -> Dialogue[None]:
    """Load the models that no request has loaded yet."""
    listed = entries((yield get("/models")).accepted().json, "data")
    present = {at(each, "id") for each in listed if at(each, "status", "value") in ("loaded", "loading", "sleeping")}
    yield from load({model: post("/models/load", {"model": model}) for model in models if model not in present})


SPEC = EngineSpec(
    kind="llama-router",
    summary="llama.cpp's server, started as a router (without a model)",
    read=read,
    methods=(
        ReleaseMethod(
            name="unload",
            release=unloads(lambda model: post("/models/unload", {"model": model.name})),
            serves_again="the next request loads the model again, unless the router runs with --no-models-autoload",
            undo=undo,
            check=any_selected,
            ends_holder=True,
            settle_seconds=20.0,
        ),
    ),
)
