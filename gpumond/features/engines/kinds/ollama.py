"""Ollama: each model has a runner process, which ends when the model is unloaded."""

from __future__ import annotations

import re
import time
from datetime import datetime
from typing import Any

from gpumond.facts.engines import EngineModel, EngineState
from gpumond.facts.errors import EngineError, EngineTimeout
from gpumond.facts.pools import Expected
from gpumond.features.engines.spec import (
    NAME_LENGTH,
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

PINNED_FROM_YEAR = 2200
"""``keep_alive: -1`` sets an expiry that is centuries away."""


def read(engine: Declaration) -> Dialogue[EngineState]:
    """Read ``/api/ps``, which lists what is loaded and neither loads a model nor extends its time.

    It does not list requests. The end of a request extends the time of its model, and only a model with a request
    remains after its time.
    """
    answer = (yield get("/api/ps")).accepted().json
    models, expiries, overdue = [], [], []
    for entry in entries(answer, "models"):
        if name := at(entry, "name", kind=str) or at(entry, "model", kind=str):
            expiry = at(entry, "expires_at", kind=str) or ""
            pinned = expiry[:4].isdigit() and int(expiry[:4]) >= PINNED_FROM_YEAR
            models.append(
                EngineModel(
                    name_of(name),
                    at(entry, "size_vram", kind=int),
                    pinned,
                    at(entry, "context_length", kind=int),
                )
            )
            expiries.append(f"{name} {expiry}"[:NAME_LENGTH])
            if not pinned and _has_passed(expiry):
                overdue.append(name_of(name))
    return EngineState(
        models=tuple(models),
        held_bytes=sum(model.size_bytes or 0 for model in models),
        work=tuple(sorted(expiries)),
        obstacle=f"{', '.join(overdue)}: a request runs, or it is being unloaded" if overdue else "",
    )


def _has_passed(expiry: str) -> bool:
    try:
        return datetime.fromisoformat(re.sub(r"\.\d+", "", expiry).replace("Z", "+00:00")).timestamp() < time.time()
    except ValueError:
        return False


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
    """Unload each model, and return each with the options that load it again as it was.

    Without a prompt and with a keep_alive of 0, the request loads nothing.
    """
    names, released = releasable(engine, state), []
    for model in state.models:
        if model.name in names:
            (yield post("/api/generate", {"model": model.name, "keep_alive": 0, "stream": False})).accepted()
            context = f" num_ctx={model.context_length}" if model.context_length else ""
            released.append(f"{model.name}{context}{' keep_alive=-1' if model.pinned else ''}")
    return tuple(released)


def undo(engine: Declaration, released: tuple[str, ...]) -> Dialogue[None]:
    """Load each model with its context and pin. A model that generates no text is loaded by an empty input."""
    failed = []
    for text in released:
        name, *options = text.split(" ")
        values = dict(option.split("=") for option in options)
        body: dict[str, Any] = {"model": name, "stream": False}
        if "num_ctx" in values:
            body["options"] = {"num_ctx": int(values["num_ctx"])}
        if "keep_alive" in values:
            body["keep_alive"] = int(values["keep_alive"])
        try:
            answer = yield post("/api/generate", body)
            if answer.status == 400:
                answer = yield post("/api/embed", body | {"input": ""})
            answer.accepted()
        except EngineTimeout:
            raise
        except EngineError as error:
            failed.append(f"{name}: {error}")
    if failed:
        raise EngineError("; ".join(failed))


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
