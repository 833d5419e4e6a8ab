"""vLLM: releases its KV cache, or its KV cache and weights, while the server is paused.

Requests of the methods exist only if the server runs with VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode. The server is
paused first, with the mode that completes running requests. Until it wakes up, it answers 503; versions before 0.33
keep requests waiting. Level 2 of its sleep, which discards the weights, is never used.
"""

from __future__ import annotations

from dataclasses import replace

from gpumond.facts.engines import EngineModel, EngineState
from gpumond.facts.errors import EngineError
from gpumond.features.engines.settings import EngineConfig
from gpumond.features.engines.spec import (
    Dialogue,
    EngineSpec,
    Metrics,
    ReleaseMethod,
    at,
    flag,
    get,
    name_of,
    post,
    sends,
)

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
KV_CACHE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
WORK = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total")


def read(engine: EngineConfig) -> Dialogue[EngineState]:
    """Read the metrics; where the release is allowed also ``/is_sleeping`` and ``/is_paused``, which exist in the
    development mode only.
    """
    page = Metrics((yield get("/metrics", of_metrics=True)).accepted().body)
    running = page.count(RUNNING)
    if running is None:
        raise EngineError(f"its metrics lack {RUNNING}: start it without --disable-log-stats, or correct the kind")
    states = page.samples("vllm:engine_sleep_state")
    awake = [sample.value for sample in states if sample.labels.get("sleep_state") == "awake"]
    sleeping: bool | None = None if not awake else min(awake) <= 0  # all states are 0 without the KV cache alone
    paused: bool | None = None
    if engine.may_release:
        reported, paused = (yield from flag("is_sleeping")), (yield from flag("is_paused"))
        if reported is not None and not paused:  # it is true for a mere pause, too
            sleeping = sleeping or reported
    models = {name_of(sample.labels["model_name"]) for sample in page.samples(RUNNING) if "model_name" in sample.labels}
    busy = page.total("vllm:sleep_mode_operations_in_flight")
    return EngineState(
        models=tuple(map(EngineModel, sorted(models))),
        running=running,
        waiting=page.count(WAITING),
        kv_cache_used_ratio=page.mean(*KV_CACHE),
        sleeping=sleeping,
        paused=paused,
        work=page.counters(*WORK),
        obstacle="it is going to sleep or waking up" if busy else "",
    )


def check(engine: EngineConfig, state: EngineState) -> Dialogue[str]:
    """Read the configuration. The server examines its environment first, which takes several seconds."""
    answer = yield get("/server_info", config_format="json")
    if answer.status == 404:
        return "its development routes are off: start it with VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode"
    enabled = at(answer.accepted().json, "vllm_config", "model_config", "enable_sleep_mode")
    if enabled is not True:
        return "sleep mode is off: start it with --enable-sleep-mode; otherwise it would pause and release nothing"
    return ""


DRAIN = post("/pause", seconds=30.0, mode="wait")
COMEBACK = (
    "gpumond flush --workload NAME --step engine --wake; until then requests are answered with 503 (before 0.33: wait)"
)

KV_CACHE_ALONE = ReleaseMethod(
    name="kv_cache",
    release=sends(DRAIN, post("/release_kv_cache_memory")),
    serves_again=COMEBACK,
    undo=sends(post("/wake_up"), post("/resume")),
    check=check,
    stops_service=True,
    waits=True,
    call_seconds=60.0,
)
"""Its undo maps all that is not resident, then ends the pause. Neither has an effect on a server that serves.

``/resume`` alone would serve requests without the memory of a release that failed halfway.
"""

SLEEP = replace(
    KV_CACHE_ALONE,
    name="sleep",
    release=sends(DRAIN, post("/sleep", level="1", mode="wait")),
    moves_to_host=True,
    call_seconds=120.0,
)

SPEC = EngineSpec(
    kind="vllm",
    summary="vLLM",
    read=read,
    warning="it doesn't serve until it wakes up, and its development routes are open to all who can reach its port",
    methods=(KV_CACHE_ALONE, SLEEP),
)
