"""SGLang: state only.

``/health`` is never read: it generates a token by default.
"""

from __future__ import annotations

from gpumond.engines.prometheus_text import Metrics
from gpumond.engines.spec import Declaration, Dialogue, EngineSpec, at, entries, get
from gpumond.model.engines import EngineState

RUNNING = "sglang:num_running_reqs"
WAITING = ("sglang:num_queue_reqs", "sglang:num_grammar_queue_reqs", "sglang:num_paused_reqs")
KV_CACHE_GB = "sglang:kv_cache_memory_usage_gb"
SIZES_GB = ("sglang:weight_memory_usage_gb", KV_CACHE_GB, "sglang:graph_memory_usage_gb")
GB = 1 << 30
"""SGLang divides by it, and calls the result GB."""


def read(engine: Declaration) -> Dialogue[EngineState]:
    answer = yield get("/metrics", of_metrics=True)
    if answer.status == 404:  # started without --enable-metrics
        return _of_loads((yield get("/v1/loads")).accepted().json)
    page = Metrics(answer.accepted().text)
    waiting = [count for name in WAITING if (count := page.count(name)) is not None]
    sizes = [size for name in SIZES_GB if (size := page.total(name)) is not None]
    kv_cache = page.total(KV_CACHE_GB)
    work = tuple(page.total(name) or 0.0 for name in ("sglang:prompt_tokens_total", "sglang:generation_tokens_total"))
    return EngineState(
        running=page.count(RUNNING),
        waiting=sum(waiting) if waiting else None,
        kv_cache_bytes=int(kv_cache * GB) if kv_cache else None,
        kv_cache_used_ratio=_used_ratio(page),
        held_bytes=int(sum(sizes) * GB) if sizes else None,
        work=work,
    )


def _used_ratio(page: Metrics) -> float | None:
    """Return the part of the KV cache that requests use; cached prefixes, which can be evicted, do not count."""
    parts = [page.total(f"sglang:kv_{part}_tokens") for part in ("used", "evictable", "available")]
    known = [part for part in parts if part is not None]
    if len(known) == len(parts) and sum(known) > 0:
        return known[0] / sum(known)
    return page.mean("sglang:token_usage")


def _of_loads(answer: object) -> EngineState:
    ranks = answer if isinstance(answer, list) else entries(answer, "loads")
    counts = [[at(rank, name, kind=int) for rank in ranks] for name in ("num_running_reqs", "num_waiting_reqs")]
    running, waiting = (sum(count or 0 for count in each) if each and None not in each else None for each in counts)
    return EngineState(running=running, waiting=waiting)


SPEC = EngineSpec(
    kind="sglang",
    summary="SGLang (state only)",
    read=read,
    without_levers="its release ends the server if a request runs, and health probes run requests",
)
