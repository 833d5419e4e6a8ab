"""TensorRT-LLM (trtllm-serve): closes admission, completes running requests, then releases.

``/metrics`` is not read: the server removes the statistics that it returns.
"""

from __future__ import annotations

from functools import partial

from gpumond.facts.engines import EngineState
from gpumond.facts.errors import EngineError
from gpumond.features.engines.spec import (
    Declaration,
    Dialogue,
    EngineSpec,
    Lever,
    all_but_contexts,
    at,
    entries,
    get,
    name_of,
    post,
    unknown_part,
)

STATES = ("running", "parking", "parked", "waking", "failed")
OBSTACLES = {
    "parking": "a release is in progress",
    "waking": "it is waking up",
    "failed": "its memory is in the state `failed`: restart it",
}


def read(engine: Declaration) -> Dialogue[EngineState]:
    answer = (yield get("/memory_status")).accepted().json
    state = at(answer, "state", kind=str)
    if state not in STATES:
        raise EngineError("its /memory_status has no known state: is the kind of the engine correct?")
    return EngineState(asleep=state == "parked", obstacle=OBSTACLES.get(state, ""))


def release(engine: Declaration, state: EngineState, tags: tuple[str, ...]) -> Dialogue[tuple[str, ...]]:
    """Release these tags, and return those that are parked afterwards; without a tag, all."""
    (yield post("/release_memory", {"tags": list(tags)} if tags else {})).accepted()
    return tuple(map(name_of, entries((yield get("/memory_status")).accepted().json, "parked_tags")))


def undo(engine: Declaration, tags: tuple[str, ...]) -> Dialogue[None]:
    (yield post("/resume_memory", {"tags": list(tags)} if tags else {})).accepted()


COMEBACK = "gpumond flush --workload NAME --step engine --wake; until then the server rejects requests"

SPEC = EngineSpec(
    kind="tensorrt-llm",
    summary="TensorRT-LLM (trtllm-serve --enable_sleep_mode)",
    read=read,
    warning="the server rejects requests until it wakes up, and an error during the release may require a restart",
    levers=(
        Lever(
            name="kv_cache",
            release=partial(release, tags=("kv_cache",)),
            serves_again=COMEBACK,
            estimate=unknown_part,
            undo=undo,
            stops_service=True,
            waits=True,
            call_seconds=60.0,
        ),
        Lever(
            name="sleep",
            release=partial(release, tags=()),
            serves_again=COMEBACK,
            estimate=all_but_contexts,
            undo=undo,
            stops_service=True,
            waits=True,
            moves_to_host=True,
            call_seconds=120.0,
        ),
    ),
)
