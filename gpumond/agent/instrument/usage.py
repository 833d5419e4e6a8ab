"""How much of each device's memory the program uses, over all its allocators: what scopes and steps compare."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from gpumond.agent.registry import REGISTRY
from gpumond.model.pools import PoolUsage

READ_SECONDS = 0.01
"""So long a reading waits for another one. A flush takes longer, and is not waited for."""


class DeviceLevel(NamedTuple):
    """``peak_bytes`` is the allocators' own mark since the start, None where one of them keeps none; ``alone``: there
    is but one pool, so that its peak is the device's."""

    live_bytes: int = 0
    stranded_bytes: int = 0
    peak_bytes: int | None = 0
    retries: int = 0
    alone: bool = True


NOTHING = DeviceLevel()
"""A device on which nothing has been allocated yet."""

Levels = Mapping[str, DeviceLevel]


def levels(pools: Iterable[PoolUsage]) -> dict[str, DeviceLevel]:
    """By device. A pool inside another is counted there."""
    found: dict[str, DeviceLevel] = {}
    for pool in pools:
        if pool.inside is not None:
            continue
        level = DeviceLevel(pool.live_bytes, pool.stranded_bytes, pool.peak_live_bytes, pool.retries or 0)
        before = found.get(pool.device_uuid)
        found[pool.device_uuid] = level if before is None else _both(before, level)
    return found


def read() -> dict[str, DeviceLevel] | None:
    """As they are now; None while a flush is under way. Never raises."""
    try:
        pools = REGISTRY.read(READ_SECONDS)
    except Exception:  # an allocator's own; the program has not asked for it
        return None
    return None if pools is None else levels(pools)


def _both(one: DeviceLevel, other: DeviceLevel) -> DeviceLevel:
    peaks = (one.peak_bytes, other.peak_bytes)
    return DeviceLevel(
        one.live_bytes + other.live_bytes,
        one.stranded_bytes + other.stranded_bytes,
        None if None in peaks else sum(peak or 0 for peak in peaks),
        one.retries + other.retries,
        alone=False,
    )
