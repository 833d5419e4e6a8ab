"""Metric families of declared serving engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gpumond.facts.engines import EngineReading
from gpumond.facts.frame import Frame
from gpumond.metrics.families import Family, Row


def engine_family(name: str, value: Callable[[EngineReading], float | None], help: str) -> Family:
    def rows(frame: Frame) -> Iterator[Row]:
        for engine in frame.snapshot.engines:
            yield (engine.name, engine.kind), value(engine)

    return Family(f"gpumond_engine_{name}", "gauge", help, ("engine", "kind"), rows)


def _memory(frame: Frame) -> Iterator[Row]:
    """Yield the driver's count of each engine's processes on each device; unknown if the driver reports none."""
    for engine in frame.snapshot.engines:
        for device, used in frame.snapshot.used_by_engine(engine):
            yield (device.uuid, str(device.index), engine.name, engine.kind), used


def _models(engine: EngineReading) -> float | None:
    return len(engine.models) if engine.up else None


FAMILIES: tuple[Family, ...] = (
    engine_family("up", lambda engine: float(engine.up), "1 if the declared serving engine answers, else 0."),
    engine_family(
        "kv_cache_used_ratio",
        lambda engine: engine.kv_cache_used_ratio,
        "Part of the engine's KV cache that requests use. The memory of the whole cache is in use on the device.",
    ),
    engine_family("requests_running", lambda engine: engine.running, "Requests that the engine is processing."),
    engine_family("requests_waiting", lambda engine: engine.waiting, "Requests that wait in the engine's queue."),
    engine_family("asleep", lambda engine: engine.asleep, "1 if the engine sleeps, else 0."),
    engine_family("paused", lambda engine: engine.paused, "1 if the engine is paused, else 0."),
    engine_family(
        "returning_seconds",
        lambda engine: engine.returning_seconds,
        "Time for which gpumond has tried to return the engine to service after a release, and it does not serve. "
        "Absent otherwise.",
    ),
    engine_family(
        "idle_seconds",
        lambda engine: engine.idle_seconds,
        "Time without a request and without work on a device, as far as engine and driver state it.",
    ),
    engine_family("models_loaded", _models, "Models that the engine has loaded, as it lists them."),
    engine_family("stated_bytes", lambda engine: engine.held_bytes, "Device memory in use, as the engine states it."),
    Family(
        "gpumond_engine_memory_used_bytes",
        "gauge",
        "Device memory used by the engine's processes, as reported by the driver.",
        ("uuid", "gpu", "engine", "kind"),
        _memory,
    ),
)
