"""An engine that the configuration describes: its requests, and where its answers state what (JSON pointers)."""

from __future__ import annotations

from typing import Any

from gpumond.facts.engines import EngineModel, EngineState
from gpumond.facts.errors import EngineError
from gpumond.facts.pools import Expected
from gpumond.features.engines.settings import EngineConfig, RequestConfig
from gpumond.features.engines.spec import Dialogue, EngineSpec, ReleaseMethod, name_of, sends


def resolve(document: Any, pointer: str) -> Any:
    """Return the value at a JSON pointer (RFC 6901); None if there is none."""
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(document, list):
            document = document[int(key)] if key.isdigit() and int(key) < len(document) else None
        else:
            document = document.get(key) if isinstance(document, dict) else None
    return document


def read(engine: EngineConfig) -> Dialogue[EngineState]:
    """Read the state. A declared pointer that leads nowhere is an error: an idle engine must not be assumed."""
    pointers = engine.state
    assert pointers is not None, "the configuration requires it"
    answer = (yield pointers.call).accepted().json

    def value(pointer: str) -> Any:
        found = resolve(answer, pointer) if pointer else None
        if pointer and found is None:
            raise EngineError(f"its answer has no value at {pointer}")
        return found

    def number(pointer: str) -> float | None:
        stated = value(pointer)
        return float(stated) if isinstance(stated, (int, float)) and not isinstance(stated, bool) else None

    def count(pointer: str) -> int | None:
        """Return a number, the length of a list or object, or 1 for True."""
        stated = value(pointer)
        if isinstance(stated, (list, dict)):
            return len(stated)
        if stated is not None and (not isinstance(stated, (int, float)) or stated < 0):
            raise EngineError(f"its answer at {pointer} is neither a number, a list nor true or false")
        return None if stated is None else -int(-stated // 1)  # half a request is a request

    models, sleeping, work = value(pointers.models), value(pointers.sleeping), value(pointers.work)
    kv_cache, held = number(pointers.kv_cache_bytes), number(pointers.held_bytes)
    names = models if isinstance(models, (list, dict)) else [models]
    return EngineState(
        models=tuple(EngineModel(name_of(name)) for name in names if isinstance(name, str)),
        running=count(pointers.running),
        waiting=count(pointers.waiting),
        kv_cache_bytes=None if kv_cache is None else int(kv_cache),
        kv_cache_used_ratio=number(pointers.kv_cache_used_ratio),
        held_bytes=None if held is None else int(held),
        sleeping=sleeping if isinstance(sleeping, bool) else None,
        work=None if work is None else (str(work),),
    )


def method(engine: EngineConfig) -> ReleaseMethod | None:
    """Return the method that the declaration describes."""
    release, wake = engine.release, engine.wake if isinstance(engine.wake, RequestConfig) else None
    if release is None:
        return None
    wakes = "gpumond flush --workload NAME --step engine --wake, or as the engine does by itself"
    return ReleaseMethod(
        name="release",
        release=sends(release.call),
        serves_again=wakes if wake else "as the engine does by itself",
        estimate=None if release.ends_process else lambda engine, state, used: Expected(0, 0, used, "interval"),
        undo=sends(wake.call) if wake else None,
        stops_service=wake is not None,
        ends_holder=release.ends_process,
        waits=release.waits,
        moves_to_host=release.moves_to_host,
    )


def mistake(engine: EngineConfig) -> str:
    state, release = engine.state, engine.release
    if release is None:
        return "allow requires release, the request that releases memory"
    if state and not (state.running or state.waiting or release.waits):
        return (
            "allow requires state.running or state.waiting, because a busy engine must not be interrupted; or "
            "release.waits: true, if the engine completes running requests first"
        )
    return ""


SPEC = EngineSpec(
    kind="generic",
    summary="any engine with an HTTP request that releases memory, described by JSON pointers",
    read=read,
    method_of=method,
    warning="gpumond knows the engine only from its description",
    mistake=mistake,
)
