"""Rules on declared serving engines. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gpumond.facts.engines import EngineReading
from gpumond.facts.snapshot import MAX_MISSED_READINGS, Snapshot
from gpumond.facts.units import duration_text
from gpumond.quantities.program_quantities import ENGINE_QUANTITIES as QUANTITIES, ENGINE_USED
from gpumond.quantities.quantity import Quantity, value_text
from gpumond.quantities.scope import RuleContext, ScopeSpec, size_text_or_unknown

IDLE_KV_CACHE_RATIO = 0.10


class _EngineRow(NamedTuple):
    engine: EngineReading
    used_bytes: int | None


def engine_rows(context: RuleContext) -> Sequence[_EngineRow]:
    return [_EngineRow(engine, _used_bytes(context.snapshot, engine)) for engine in context.snapshot.engines]


def _used_bytes(snapshot: Snapshot, engine: EngineReading) -> int | None:
    """Return the driver's count of the engine's processes.

    The count is 0 if no process is listed and the engine states that it holds nothing; otherwise the processes may be
    those of a proxy.
    """
    if any(device.missed_readings >= MAX_MISSED_READINGS for device in snapshot.devices):
        return None
    counts = [used for _, used in snapshot.used_by_engine(engine)]
    if not counts:
        return 0 if engine.held_bytes == 0 and not engine.processes and not engine.processes_problem else None
    return sum(counts)


def _used_bytes_with_idle_kv_cache(row: _EngineRow) -> float | None:
    used_ratio = row.engine.kv_cache_used_ratio
    return None if used_ratio is None else row.used_bytes if used_ratio < IDLE_KV_CACHE_RATIO else 0.0


def _kv_cache_text(row: _EngineRow) -> str:
    ratio = row.engine.kv_cache_used_ratio
    return "an unknown part" if ratio is None else value_text("ratio", ratio)


def _idle_text(row: _EngineRow) -> str:
    seconds = row.engine.idle_seconds
    return "an unknown time" if seconds is None else duration_text(seconds)


QUANTITIES_BY_NAME: dict[str, Quantity[_EngineRow]] = {
    each.name: each.of_part(lambda row: row.engine) for each in QUANTITIES
}


def _values(*names: str) -> tuple[Quantity[_EngineRow], ...]:
    return tuple(QUANTITIES_BY_NAME[name] for name in names)


ENGINE_SCOPE = ScopeSpec(
    rows=engine_rows,
    quantities=(
        *_values("up"),
        Quantity(ENGINE_USED.name, ENGINE_USED.text, lambda row: row.used_bytes),
        *_values("idle_seconds", "running_requests", "waiting_requests", "kv_cache_used_ratio"),
        Quantity(
            "kv_cache_idle_used_bytes",
            f"`used_bytes` while requests use less than {IDLE_KV_CACHE_RATIO:.0%} of the KV cache, otherwise 0",
            _used_bytes_with_idle_kv_cache,
        ),
        *_values(
            "kv_cache_bytes",
            "held_bytes",
            "models",
            "state_age_seconds",
            "sleeping",
            "paused",
            "out_of_service_seconds",
        ),
    ),
    label_meanings={"engine": "the engine's name", "kind": "the engine's kind, such as vllm"},
    labels_of=lambda row: (("engine", row.engine.name), ("kind", row.engine.kind)),
    placeholders={
        "engine": ("the engine's name", lambda row: row.engine.name),
        "kind": ("the engine's kind", lambda row: row.engine.kind),
        "used": (
            "memory of the engine's processes, as the driver counts it",
            lambda row: size_text_or_unknown(row.used_bytes),
        ),
        "kv_cache": ("fraction of the KV cache that requests use", _kv_cache_text),
        "idle": ("time without a request", _idle_text),
        "models": (
            "the loaded models",
            lambda row: ", ".join(model.name for model in row.engine.models) or "no known model",
        ),
        "reason": (
            "why the engine can't be read or is out of service; otherwise empty",
            lambda row: row.engine.problem or row.engine.out_of_service_reason,
        ),
    },
)
