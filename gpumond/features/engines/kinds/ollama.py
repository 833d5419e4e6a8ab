"""Ollama: each model has a runner process, which ends when the model is unloaded."""

from __future__ import annotations

import re
import time
from datetime import datetime
from typing import Any

from gpumond.facts.engines import EngineModel, EngineState
from gpumond.facts.errors import EngineError, EngineTimeout
from gpumond.features.engines.settings import EngineConfig
from gpumond.features.engines.spec import (
    NAME_LENGTH,
    Call,
    Dialogue,
    EngineSpec,
    ReleaseMethod,
    any_selected,
    at,
    entries,
    get,
    name_of,
    post,
    unloads,
)

PINNED_FROM_YEAR = 2200
"""``keep_alive: -1`` sets an expiry that is centuries away."""


def read(engine: EngineConfig) -> Dialogue[EngineState]:
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
            size, context = at(entry, "size_vram", kind=int), at(entry, "context_length", kind=int)
            models.append(EngineModel(name_of(name), size, pinned, context))
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


def unload(model: EngineModel) -> Call:
    """Without a prompt and with a keep_alive of 0, the request loads nothing."""
    return post("/api/generate", {"model": model.name, "keep_alive": 0, "stream": False})


def options(model: EngineModel) -> str:
    """Return the name of a model with the options that load it again as it was."""
    context = f" num_ctx={model.context_length}" if model.context_length else ""
    return f"{model.name}{context}{' keep_alive=-1' if model.pinned else ''}"


def undo(engine: EngineConfig, released: tuple[str, ...]) -> Dialogue[None]:
    """Load each model with its context and pin. A model that generates no text is loaded by an empty input."""
    failed = []
    for text in released:
        name, *rest = text.split(" ")
        values = dict(option.split("=") for option in rest)
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


SPEC = EngineSpec(
    kind="ollama",
    summary="Ollama",
    read=read,
    methods=(
        ReleaseMethod(
            name="unload",
            release=unloads(unload, options),
            serves_again="the next request loads the model again",
            undo=undo,
            check=any_selected,
            ends_holder=True,
            waits=True,
            settle_seconds=15.0,
        ),
    ),
)
