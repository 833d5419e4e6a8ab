"""SGLang: state only.

``/health`` is never read: it generates a token by default.
"""

from __future__ import annotations

from dataclasses import replace

from gpumond.facts.engines import EngineState
from gpumond.features.engines.settings import EngineConfig
from gpumond.features.engines.spec import Dialogue, EngineSpec, Metrics, at, entries, get

WAITING = ("sglang:num_queue_reqs", "sglang:num_grammar_queue_reqs", "sglang:num_paused_reqs")
GB = 1 << 30
"""SGLang divides by it, and calls the result GB."""


def read(engine: EngineConfig) -> Dialogue[EngineState]:
    """Read the metrics and the loads. Only the loads state sizes and how many ranks have them, and with an api key they
    require it; without --enable-metrics, they state the requests, too.
    """
    answer = yield get("/metrics", of_metrics=True)
    loads = yield get("/v1/loads", include="core,memory")
    if answer.status == 404:
        return _of_loads(loads.accepted().json)
    page = _OneRank(answer.accepted().body)
    return replace(
        _of_loads(loads.json) if loads.status == 200 else EngineState(),
        running=page.count("sglang:num_running_reqs"),
        waiting=page.sum_of(*WAITING),
        kv_cache_used_ratio=_used_ratio(page),
        work=page.counters("sglang:prompt_tokens_total", "sglang:generation_tokens_total"),
    )


class _OneRank(Metrics):
    """Samples of the first tensor-parallel rank of each replica, since each rank counts the same requests."""

    def __init__(self, page: bytes) -> None:
        lines = page.split(b"\n")
        super().__init__(b"\n".join(line for line in lines if b'tp_rank="' not in line or b'tp_rank="0"' in line))


def _bytes(gigabytes: float | None, ranks: int | None) -> int | None:
    return int(gigabytes * GB) * ranks if gigabytes and ranks else None


def _used_ratio(page: Metrics) -> float | None:
    """Return the part of the KV cache that requests use; cached prefixes, which can be evicted, do not count."""
    parts = [page.total(f"sglang:kv_{part}_tokens") for part in ("used", "evictable", "available")]
    known = [part for part in parts if part is not None]
    if len(known) == len(parts) and sum(known) > 0:
        return known[0] / sum(known)
    return page.mean("sglang:token_usage")


def _of_loads(answer: object) -> EngineState:
    ranks = answer if isinstance(answer, list) else entries(answer, "loads")
    accelerators = at(answer, "num_accelerators", kind=int)

    def total(*path: str) -> float | None:
        values = [at(rank, *path, kind=(int, float)) for rank in ranks]
        return sum(values) if values and None not in values else None

    running, waiting, in_use = total("num_running_reqs"), total("num_waiting_reqs"), total("token_usage")
    sizes = [total("memory", f"{part}_gb") for part in ("kv_cache", "weight", "graph")]
    known = [size for size in sizes if size is not None]
    return EngineState(
        running=None if running is None else int(running),
        waiting=None if waiting is None else int(waiting),
        kv_cache_bytes=_bytes(sizes[0], accelerators),
        kv_cache_used_ratio=None if in_use is None else in_use / len(ranks),
        held_bytes=_bytes(sum(known), accelerators) if len(known) == len(sizes) else None,
    )


SPEC = EngineSpec(
    kind="sglang",
    summary="SGLang (state only)",
    read=read,
    without_methods="its release ends the server if a request runs, and health probes run requests",
)
