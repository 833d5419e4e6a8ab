"""vLLM: releases its KV cache, or its KV cache and weights, while the server is paused.

Requests of the lever exist only if the server runs with VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode. The server is
paused first, with the mode that completes running requests; until it wakes up, it answers 503. Level 2 of its sleep,
which discards the weights, is never used.
"""

from __future__ import annotations

from functools import partial

from gpumond.engines.prometheus_text import Metrics
from gpumond.engines.spec import (
    CALL_SECONDS,
    Call,
    Declaration,
    Dialogue,
    EngineSpec,
    Lever,
    all_but_contexts,
    at,
    get,
    name_of,
    post,
    unknown_part,
)
from gpumond.errors import EngineError, EngineRejected, EngineTimeout
from gpumond.model.engines import EngineModel, EngineState
from gpumond.model.pools import ENGINE_STEP

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
KV_CACHE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
WORK = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total")
DRAIN_SECONDS = 30.0


def read(engine: Declaration) -> Dialogue[EngineState]:
    """Read the metrics; where the lever is allowed also ``/is_sleeping``, which exists in the development mode only."""
    page = Metrics((yield get("/metrics", of_metrics=True)).accepted().text)
    asleep: bool | None = None
    states = [sample for sample in page.samples("vllm:engine_sleep_state") if sample.value > 0]
    if states:
        asleep = any(sample.labels.get("sleep_state") != "awake" for sample in states)
    elif ENGINE_STEP in engine.allow:
        answer = yield get("/is_sleeping")
        asleep = at(answer.json, "is_sleeping", kind=bool) if answer.status == 200 else None
    models = {name_of(sample.labels["model_name"]) for sample in page.samples(RUNNING) if "model_name" in sample.labels}
    busy = page.total("vllm:sleep_mode_operations_in_flight")
    return EngineState(
        models=tuple(map(EngineModel, sorted(models))),
        running=page.count(RUNNING),
        waiting=page.count(WAITING),
        kv_cache_used_ratio=page.mean(*KV_CACHE),
        asleep=asleep,
        work=tuple(page.total(name) or 0.0 for name in WORK),
        obstacle="it falls asleep or wakes up at this moment" if busy else "",
    )


def check(engine: Declaration, state: EngineState) -> Dialogue[str]:
    answer = yield get("/server_info", config_format="json")
    if answer.status == 404:
        return "its development routes are off: start it with VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode"
    enabled = at(answer.accepted().json, "vllm_config", "model_config", "enable_sleep_mode")
    if enabled is not True:
        return "sleep mode is off: start it with --enable-sleep-mode; otherwise it would pause and release nothing"
    return ""


def release(engine: Declaration, state: EngineState, call: Call) -> Dialogue[tuple[str, ...]]:
    """Pause, then release. If the release is rejected, the server resumes."""
    try:
        (yield post("/pause", seconds=DRAIN_SECONDS, mode="wait")).accepted()
    except EngineTimeout:
        yield from _resume()
        raise
    try:
        (yield call).accepted()
    except EngineRejected:
        yield from _resume()
        raise
    return ()


def _resume() -> Dialogue[None]:
    try:
        (yield post("/resume", seconds=CALL_SECONDS)).accepted()
    except EngineError as error:
        raise EngineError(f"it remains paused, since it did not resume: {error}; call POST /resume") from None


def undo(engine: Declaration, released: tuple[str, ...], tag: str = "") -> Dialogue[None]:
    (yield post("/wake_up", tags=tag) if tag else post("/wake_up")).accepted()


COMEBACK = "gpumond flush --workload NAME --step engine --wake; until then the server answers 503"

SPEC = EngineSpec(
    kind="vllm",
    summary="vLLM",
    read=read,
    warning="the server answers 503 until it wakes up, and its development routes are open to all that reach its port",
    levers=(
        Lever(
            name="kv_cache",
            release=partial(release, call=post("/release_kv_cache_memory")),
            serves_again=COMEBACK,
            estimate=unknown_part,
            undo=partial(undo, tag="kv_cache"),
            check=check,
            waits=True,
            call_seconds=60.0,
        ),
        Lever(
            name="sleep",
            release=partial(release, call=post("/sleep", level="1", mode="wait")),
            serves_again=COMEBACK,
            estimate=all_but_contexts,
            undo=undo,
            check=check,
            waits=True,
            moves_to_host=True,
            call_seconds=120.0,
        ),
    ),
)
