"""LMDeploy: level 1 of its sleep moves the weights to the memory of the machine and drops the KV cache.

The call ends all sessions. Level 2 would lose the weights.
"""

from __future__ import annotations

from gpumond.facts.engines import EngineState
from gpumond.features.engines.settings import EngineConfig
from gpumond.features.engines.spec import Dialogue, EngineSpec, Metrics, ReleaseMethod, flag, get, post, sends

WAITING = ("lmdeploy:num_requests_waiting", "lmdeploy:num_api_requests_waiting")
WORK = ("lmdeploy:prompt_tokens_total", "lmdeploy:generation_tokens_total", "lmdeploy:num_requests_finished")


def read(engine: EngineConfig) -> Dialogue[EngineState]:
    page = Metrics((yield get("/metrics", of_metrics=True)).accepted().body)
    return EngineState(
        running=page.count("lmdeploy:num_requests_running"),
        waiting=page.sum_of(*WAITING),
        kv_cache_used_ratio=page.mean("lmdeploy:gpu_cache_usage_perc"),
        sleeping=(yield from flag("is_sleeping")) if engine.may_release else None,
        work=page.counters(*WORK),
    )


SPEC = EngineSpec(
    kind="lmdeploy",
    summary="LMDeploy",
    read=read,
    warning="its sleep ends all sessions, even one that begins at the same moment, and needs no key",
    methods=(
        ReleaseMethod(
            name="sleep",
            release=sends(post("/sleep", {}, level="1")),
            serves_again="gpumond flush --workload NAME --step engine --wake; until then the server answers 503",
            undo=sends(post("/wakeup", {})),
            stops_service=True,
            moves_to_host=True,
            call_seconds=60.0,
        ),
    ),
)
