"""TensorRT-LLM (trtllm-serve): closes admission, completes running requests, then releases.

``/metrics`` is not read: the server removes the statistics that it returns.
"""

from __future__ import annotations

from dataclasses import replace

from gpumond.facts.engines import EngineState
from gpumond.facts.errors import EngineError
from gpumond.features.engines.settings import EngineConfig
from gpumond.features.engines.spec import Dialogue, EngineSpec, ReleaseMethod, at, entries, get, name_of, post

STATES = ("running", "parking", "parked", "waking", "failed")
OBSTACLES = {
    "parking": "a release is in progress",
    "waking": "it is waking up",
    "failed": "its memory is in the state `failed`: restart it",
}


def read(engine: EngineConfig) -> Dialogue[EngineState]:
    answer = (yield get("/memory_status")).accepted().json
    state = at(answer, "state", kind=str)
    if state not in STATES:
        raise EngineError("its /memory_status has no known state: is the engine's kind correct?")
    return EngineState(sleeping=state == "parked", obstacle=OBSTACLES.get(state, ""))


def release(engine: EngineConfig, state: EngineState) -> Dialogue[tuple[str, ...]]:
    """Release what the method names, and return the tags that are parked afterwards. Without a tag, all is released."""
    body = {} if engine.method == "sleep" else {"tags": ["kv_cache"]}
    (yield post("/release_memory", body)).accepted()
    return tuple(map(name_of, entries((yield get("/memory_status")).accepted().json, "parked_tags")))


def undo(engine: EngineConfig, tags: tuple[str, ...]) -> Dialogue[None]:
    (yield post("/resume_memory", {"tags": list(tags)} if tags else {})).accepted()


KV_CACHE = ReleaseMethod(
    name="kv_cache",
    release=release,
    serves_again="gpumond flush --workload NAME --step engine --wake; until then the server rejects requests",
    undo=undo,
    stops_service=True,
    waits=True,
    call_seconds=60.0,
)

SPEC = EngineSpec(
    kind="tensorrt-llm",
    summary="TensorRT-LLM (trtllm-serve --enable_sleep_mode)",
    read=read,
    warning="the server rejects requests until it wakes up, and an error during the release may require a restart",
    methods=(KV_CACHE, replace(KV_CACHE, name="sleep", moves_to_host=True, call_seconds=120.0)),
)
