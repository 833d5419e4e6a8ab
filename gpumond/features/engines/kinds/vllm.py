"""vLLM: releases its KV cache, or its KV cache and weights, while the server is paused.

Requests of the lever exist only if the server runs with VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode. The server is
paused first, with the mode that completes running requests. Until it wakes up, it answers 503; versions before 0.33
keep requests waiting. Level 2 of its sleep, which discards the weights, is never used.
"""

from __future__ import annotations

from functools import partial

from gpumond.facts.engines import EngineModel, EngineState
from gpumond.facts.errors import EngineError
from gpumond.facts.pools import ENGINE_STEP
from gpumond.features.engines.prometheus_text import Metrics
from gpumond.features.engines.spec import (
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

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
KV_CACHE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
WORK = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total")
DRAIN_SECONDS = 30.0


def read(engine: Declaration) -> Dialogue[EngineState]:
    """Read the metrics; where the lever is allowed also ``/is_sleeping`` and ``/is_paused``, which exist in the
    development mode only.
    """
    page = Metrics((yield get("/metrics", of_metrics=True)).accepted().body)
    running = page.count(RUNNING)
    if running is None:
        raise EngineError(f"its metrics lack {RUNNING}: start it without --disable-log-stats, or correct the kind")
    states = page.samples("vllm:engine_sleep_state")
    awake = [sample.value for sample in states if sample.labels.get("sleep_state") == "awake"]
    asleep: bool | None = None if not awake else min(awake) <= 0  # all states are 0 without the KV cache alone
    paused: bool | None = None
    if ENGINE_STEP in engine.allow:
        sleeping, paused = (yield from _flag("is_sleeping")), (yield from _flag("is_paused"))
        if sleeping is not None and not paused:  # it is true for a mere pause, too
            asleep = asleep or sleeping
    models = {name_of(sample.labels["model_name"]) for sample in page.samples(RUNNING) if "model_name" in sample.labels}
    busy = page.total("vllm:sleep_mode_operations_in_flight")
    return EngineState(
        models=tuple(map(EngineModel, sorted(models))),
        running=running,
        waiting=page.count(WAITING),
        kv_cache_used_ratio=page.mean(*KV_CACHE),
        asleep=asleep,
        paused=paused,
        work=page.counters(*WORK),
        obstacle="it falls asleep or wakes up at this moment" if busy else "",
    )


def _flag(name: str) -> Dialogue[bool | None]:
    """Return the value of a route of the development mode; None without it, and in versions that lack the route."""
    answer = yield get(f"/{name}")
    found: bool | None = at(answer.json, name, kind=bool) if answer.status == 200 else None
    return found


def check(engine: Declaration, state: EngineState) -> Dialogue[str]:
    """Read the configuration. The server examines its environment first, which takes several seconds."""
    answer = yield get("/server_info", config_format="json")
    if answer.status == 404:
        return "its development routes are off: start it with VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode"
    enabled = at(answer.accepted().json, "vllm_config", "model_config", "enable_sleep_mode")
    if enabled is not True:
        return "sleep mode is off: start it with --enable-sleep-mode; otherwise it would pause and release nothing"
    return ""


def release(engine: Declaration, state: EngineState, call: Call) -> Dialogue[tuple[str, ...]]:
    (yield post("/pause", seconds=DRAIN_SECONDS, mode="wait")).accepted()
    (yield call).accepted()
    return ()


def undo(engine: Declaration, released: tuple[str, ...]) -> Dialogue[None]:
    """Map all that is not resident, then end the pause. Neither has an effect on a server that serves.

    ``/resume`` alone would serve requests without the memory of a release that failed halfway.
    """
    (yield post("/wake_up")).accepted()
    (yield post("/resume")).accepted()


COMEBACK = (
    "gpumond flush --workload NAME --step engine --wake; until then requests are answered with 503 (before 0.33: wait)"
)

SPEC = EngineSpec(
    kind="vllm",
    summary="vLLM",
    read=read,
    warning="it does not serve until it wakes up, and its development routes are open to all that reach its port",
    levers=(
        Lever(
            name="kv_cache",
            release=partial(release, call=post("/release_kv_cache_memory")),
            serves_again=COMEBACK,
            estimate=unknown_part,
            undo=undo,
            check=check,
            stops_service=True,
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
            stops_service=True,
            waits=True,
            moves_to_host=True,
            call_seconds=120.0,
        ),
    ),
)
