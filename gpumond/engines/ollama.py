"""Ollama: each model has a runner process, which ends when the model is unloaded."""

from __future__ import annotations

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
)
from gpumond.model.engines import EngineModel, EngineState
from gpumond.model.pools import Expected

PINNED_FROM_YEAR = 2200
"""``keep_alive: -1`` sets an expiry that is centuries away."""


def read(engine: Declaration) -> Dialogue[EngineState]:
    """Read ``/api/ps``, which lists what is loaded and neither loads a model nor extends its time."""
    answer = (yield get("/api/ps")).accepted().json
    models, expiries = [], []
    for entry in entries(answer, "models"):
        if name := at(entry, "name", kind=str) or at(entry, "model", kind=str):
            expiry = at(entry, "expires_at", kind=str) or ""
            pinned = expiry[:4].isdigit() and int(expiry[:4]) >= PINNED_FROM_YEAR
            models.append(EngineModel(name_of(name), at(entry, "size_vram", kind=int), pinned))
            expiries.append(f"{name} {expiry}")  # a request extends the expiry of its model
    held = sum(model.size_bytes or 0 for model in models)
    return EngineState(models=tuple(models), held_bytes=held, work=tuple(sorted(expiries)))


def releasable(engine: Declaration, state: EngineState) -> tuple[str, ...]:
    """Return the models to unload: the declared ones, else those that are not pinned."""
    return tuple(
        model.name for model in state.models if (model.name in engine.models if engine.models else not model.pinned)
    )


def check(engine: Declaration, state: EngineState) -> Dialogue[str]:
    yield from ()
    if releasable(engine, state) or not state.models:
        return ""
    names = ", ".join(model.name for model in state.models)
    return f"{names}: pinned with keep_alive, or not among the declared models; list them under models: to unload them"


def release(engine: Declaration, state: EngineState) -> Dialogue[tuple[str, ...]]:
    """Unload each model. Without a prompt and with a keep_alive of 0, the request loads nothing."""
    models = releasable(engine, state)
    for model in models:
        (yield post("/api/generate", {"model": model, "keep_alive": 0, "stream": False})).accepted()
    return models


def undo(engine: Declaration, models: tuple[str, ...]) -> Dialogue[None]:
    for model in models:
        (yield post("/api/generate", {"model": model, "stream": False})).accepted()


def estimate(engine: Declaration, state: EngineState, used: int) -> Expected:
    """Estimate all bytes if all models go; else the engine's own figures of those that go."""
    models = releasable(engine, state)
    if len(models) == len(state.models):
        return all_of_it(engine, state, used)
    stated = min(used, sum(model.size_bytes or 0 for model in state.models if model.name in models))
    return Expected(0, stated, used, "interval")


SPEC = EngineSpec(
    kind="ollama",
    summary="Ollama",
    read=read,
    levers=(
        Lever(
            name="unload",
            release=release,
            serves_again="the next request loads the model again",
            estimate=estimate,
            undo=undo,
            check=check,
            ends_holder=True,
            waits=True,
            settle_seconds=15.0,
        ),
    ),
)
