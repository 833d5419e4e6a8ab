from __future__ import annotations

from typing import Any

from ..world import WORLD


def memory_snapshot(*mempool_id: object, **options: bool) -> list[dict[str, Any]]:
    if options and not WORLD.takes_include_traces:
        raise TypeError("memory_snapshot() got an unexpected keyword argument 'include_traces'")
    WORLD.calls.append("snapshot")
    return WORLD.snapshot()
