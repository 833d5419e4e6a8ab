"""An engine that the configuration describes: its requests, and where its answers state what (JSON pointers)."""

from __future__ import annotations

from typing import Any

from gpumond.facts.engines import EngineModel, EngineState
from gpumond.facts.errors import EngineError
from gpumond.features.engines.spec import (
    Declaration,
    Dialogue,
    EngineSpec,
    Generic,
    Lever,
    all_of_it,
    name_of,
    unknown_part,
)


def resolve(document: Any, pointer: str) -> Any:
    """Return the value at a JSON pointer (RFC 6901); None if there is none."""
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(document, list):
            document = document[int(key)] if key.isdigit() and int(key) < len(document) else None
        else:
            document = document.get(key) if isinstance(document, dict) else None
    return document


def read(engine: Declaration) -> Dialogue[EngineState]:
    """Read the state. A declared pointer that leads nowhere is an error: an idle engine must not be assumed."""
    generic = _described(engine)
    answer = (yield generic.read).accepted().json
    pointers = generic.pointers

    def value(pointer: str) -> Any:
        if not pointer:
            return None
        found = resolve(answer, pointer)
        if found is None:
            raise EngineError(f"its answer has no value at {pointer}")
        return found

    ratio, held, asleep = value(pointers.kv_cache_used_ratio), value(pointers.held_bytes), value(pointers.asleep)
    kv_cache, work = value(pointers.kv_cache_bytes), value(pointers.work)
    return EngineState(
        models=tuple(map(EngineModel, _names(value(pointers.models)))),
        running=_count(value(pointers.running), pointers.running),
        waiting=_count(value(pointers.waiting), pointers.waiting),
        kv_cache_bytes=int(kv_cache) if _is_number(kv_cache) else None,
        kv_cache_used_ratio=float(ratio) if _is_number(ratio) else None,
        held_bytes=int(held) if _is_number(held) else None,
        asleep=asleep if isinstance(asleep, bool) else None,
        work=None if work is None else (str(work),),
    )


def _count(value: Any, pointer: str) -> int | None:
    """Return a number, the length of a list or object, or 1 for True."""
    if value is None:
        return None
    if isinstance(value, (list, dict)):
        return len(value)
    if isinstance(value, (bool, int, float)) and value >= 0:
        return -int(-value // 1)  # half a request is a request
    raise EngineError(f"its answer at {pointer} is neither a number, a list nor true or false")


def _names(value: Any) -> list[str]:
    items = list(value) if isinstance(value, (list, dict)) else [] if value is None else [value]
    return [name_of(each) for each in items if isinstance(each, str)]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _described(engine: Declaration) -> Generic:
    assert engine.generic is not None, "the configuration requires the description"
    return engine.generic


def release(engine: Declaration, state: EngineState) -> Dialogue[tuple[str, ...]]:
    call = _described(engine).release
    assert call is not None
    (yield call).accepted()
    return ()


def undo(engine: Declaration, released: tuple[str, ...]) -> Dialogue[None]:
    call = _described(engine).wake
    if call is None:
        raise EngineError("no wake request is declared")
    (yield call).accepted()


def lever(engine: Declaration) -> Lever | None:
    """Return the lever that the declaration describes."""
    generic = _described(engine)
    if generic.release is None:
        return None
    wakes = "gpumond flush --workload NAME --step engine --wake, or as the engine does by itself"
    return Lever(
        name="release",
        release=release,
        serves_again=wakes if generic.wake else "as the engine does by itself",
        estimate=all_of_it if generic.ends_holder else unknown_part,
        undo=undo if generic.wake else None,
        stops_service=generic.wake is not None,
        ends_holder=generic.ends_holder,
        waits=generic.waits,
        moves_to_host=generic.moves_to_host,
    )


SPEC = EngineSpec(
    kind="generic",
    summary="any engine with an HTTP request that releases memory, described by JSON pointers",
    read=read,
    lever_of=lever,
    warning="gpumond knows the engine only from its description",
)
