"""Rules on declared serving engines. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gpumond.facts.engines import NOT_READ, EngineReading
from gpumond.facts.rule import Labels
from gpumond.facts.snapshot import MISSED_LIMIT, Snapshot
from gpumond.facts.units import duration
from gpumond.quantities.context import RuleAttribute, RuleContext, ScopeSpec, number, size
from gpumond.quantities.table import readable

IDLE_KV_CACHE_RATIO = 0.10


class _Engine(NamedTuple):
    engine: EngineReading
    used: int | None


def engines(context: RuleContext) -> Sequence[_Engine]:
    return [_Engine(engine, _used(context.snapshot, engine)) for engine in context.snapshot.engines]


def _used(snapshot: Snapshot, engine: EngineReading) -> int | None:
    """Return the driver's count of the engine's processes.

    It is 0 if none is listed and the engine states that it holds nothing; otherwise they may be those of a proxy.
    """
    if any(device.missed >= MISSED_LIMIT for device in snapshot.devices):
        return None
    counts = [used for _, used in snapshot.used_by_engine(engine)]
    if not counts:
        return 0 if engine.held_bytes == 0 and not engine.processes and not engine.processes_problem else None
    return sum(counts)


def _used_with_idle_kv_cache(row: _Engine) -> float | None:
    in_use = row.engine.kv_cache_used_ratio
    return None if in_use is None else row.used if in_use < IDLE_KV_CACHE_RATIO else 0.0


def _labels(row: _Engine) -> Labels:
    return ("engine", row.engine.name), ("kind", row.engine.kind)


def _texts(row: _Engine) -> dict[str, str]:
    engine = row.engine
    ratio, idle = engine.kv_cache_used_ratio, engine.idle_seconds
    return {
        "engine": engine.name,
        "kind": engine.kind,
        "used": size(row.used),
        "kv_cache": "an unknown part" if ratio is None else readable("ratio", ratio),
        "idle": "an unknown time" if idle is None else duration(idle),
        "models": ", ".join(model.name for model in engine.models) or "no known model",
        "reason": engine.problem or engine.returning_problem,
    }


ENGINE = ScopeSpec(
    rows=engines,
    values=(
        RuleAttribute(
            "up",
            "boolean",
            "1 while the engine answers, else 0; unknown before the first read",
            lambda row: None if row.engine.problem == NOT_READ else float(row.engine.up),
        ),
        RuleAttribute(
            "used_bytes",
            "bytes",
            "the driver's count for its processes on all devices",
            lambda row: row.used,
        ),
        RuleAttribute(
            "idle_seconds", "seconds", "time without a request, as far as observed", lambda row: row.engine.idle_seconds
        ),
        RuleAttribute("running_requests", "count", "requests that it is processing", lambda row: row.engine.running),
        RuleAttribute("waiting_requests", "count", "requests in its queue", lambda row: row.engine.waiting),
        RuleAttribute(
            "kv_cache_used_ratio",
            "ratio",
            "part of its KV cache that requests use",
            lambda row: row.engine.kv_cache_used_ratio,
        ),
        RuleAttribute(
            "kv_cache_idle_used_bytes",
            "bytes",
            f"`used_bytes` while requests use less than {IDLE_KV_CACHE_RATIO:.0%} of its KV cache, otherwise 0",
            _used_with_idle_kv_cache,
        ),
        RuleAttribute("kv_cache_bytes", "bytes", "size of its KV cache", lambda row: number(row.engine.kv_cache_bytes)),
        RuleAttribute(
            "held_bytes", "bytes", "its device memory, as it states it", lambda row: number(row.engine.held_bytes)
        ),
        RuleAttribute(
            "models",
            "count",
            "models that it has loaded; unknown while it does not answer",
            lambda row: float(len(row.engine.models)) if row.engine.up else None,
        ),
        RuleAttribute("state_age_seconds", "seconds", "age of its newest state", lambda row: row.engine.age_seconds),
        RuleAttribute(
            "asleep",
            "boolean",
            "1 while it sleeps, else 0",
            lambda row: number(row.engine.asleep),
        ),
        RuleAttribute(
            "paused",
            "boolean",
            "1 while it processes no requests, else 0",
            lambda row: number(row.engine.paused),
        ),
        RuleAttribute(
            "returning_seconds",
            "seconds",
            "time for which gpumond has tried to return it to service after a release, and it does not serve; 0 "
            "otherwise",
            lambda row: row.engine.returning_seconds or 0.0,
        ),
    ),
    labels={"engine": "name of the engine", "kind": "kind of the engine, such as vllm"},
    labels_of=_labels,
    placeholders={
        "engine": "name of the engine",
        "kind": "kind of the engine",
        "used": "the driver's count for its processes",
        "kv_cache": "part of its KV cache that requests use",
        "idle": "time without a request",
        "models": "its loaded models",
        "reason": "why it cannot be read, or does not serve yet; otherwise empty",
    },
    texts=_texts,
)
