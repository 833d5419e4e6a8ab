"""LMDeploy: level 1 of its sleep moves the weights to the memory of the machine and drops the KV cache.

The call ends all sessions.
"""

from __future__ import annotations

from gpumond.facts.engines import EngineState
from gpumond.facts.pools import ENGINE_STEP
from gpumond.features.engines.prometheus_text import Metrics
from gpumond.features.engines.spec import Declaration, Dialogue, EngineSpec, Lever, all_but_contexts, at, get, post

WAITING = ("lmdeploy:num_requests_waiting", "lmdeploy:num_api_requests_waiting")
WORK = ("lmdeploy:prompt_tokens_total", "lmdeploy:generation_tokens_total", "lmdeploy:num_requests_finished")


def read(engine: Declaration) -> Dialogue[EngineState]:
    page = Metrics((yield get("/metrics", of_metrics=True)).accepted().body)
    asleep = None
    if ENGINE_STEP in engine.allow:
        answer = yield get("/is_sleeping")
        asleep = at(answer.json, "is_sleeping", kind=bool) if answer.status == 200 else None
    return EngineState(
        running=page.count("lmdeploy:num_requests_running"),
        waiting=page.sum_of(*WAITING),
        kv_cache_used_ratio=page.mean("lmdeploy:gpu_cache_usage_perc"),
        asleep=asleep,
        work=page.counters(*WORK),
    )


def release(engine: Declaration, state: EngineState) -> Dialogue[tuple[str, ...]]:
    """Sleep with level 1; level 2 would lose the weights."""
    (yield post("/sleep", {}, level="1")).accepted()
    return ()


def undo(engine: Declaration, released: tuple[str, ...]) -> Dialogue[None]:
    (yield post("/wakeup", {})).accepted()


SPEC = EngineSpec(
    kind="lmdeploy",
    summary="LMDeploy",
    read=read,
    warning="its sleep ends all sessions, also one that begins at the same moment, and needs no key",
    levers=(
        Lever(
            name="sleep",
            release=release,
            serves_again="gpumond flush --workload NAME --step engine --wake; until then the server answers 503",
            estimate=all_but_contexts,
            undo=undo,
            stops_service=True,
            moves_to_host=True,
            call_seconds=60.0,
        ),
    ),
)
