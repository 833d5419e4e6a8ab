from __future__ import annotations

from typing import Any

from ..world import WORLD


def memory_snapshot(*mempool_id: object, **options: bool) -> list[dict[str, Any]]:
    if options and not WORLD.takes_include_traces:
        raise TypeError("memory_snapshot() got an unexpected keyword argument 'include_traces'")
    WORLD.calls.append("snapshot")
    return WORLD.snapshot()


def _record_memory_history(enabled: str | None = "all", **options: object) -> None:
    WORLD.calls.append(f"record {enabled} {sorted(options.items())}")
    WORLD.records_history = enabled is not None


def _snapshot() -> dict[str, Any]:
    return {"segments": WORLD.snapshot(), "device_traces": [[]]}
