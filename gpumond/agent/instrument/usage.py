"""Memory use of the program by device, over all its allocators; scopes and steps compare these levels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from gpumond.agent.registry import REGISTRY
from gpumond.model.pools import PoolUsage

READ_SECONDS = 0.01
"""Longest wait for another reading to end. A flush takes longer, and is not waited for."""


class DeviceLevel(NamedTuple):
    """The memory use on one device.

    ``peak_bytes`` is the allocators' own peak since the start, None if one of them has none. ``alone``: there is one
    pool only, so that its peak is the device's.
    """

    live_bytes: int = 0
    stranded_bytes: int = 0
    peak_bytes: int | None = 0
    retries: int = 0
    alone: bool = True


NOTHING = DeviceLevel()
"""The level of a device on which nothing has been allocated yet."""

Levels = Mapping[str, DeviceLevel]


def levels(pools: Iterable[PoolUsage]) -> dict[str, DeviceLevel]:
    """Return the levels by device. A pool inside another is counted there."""
    found: dict[str, DeviceLevel] = {}
    for pool in pools:
        if pool.inside is not None:
            continue
        level = DeviceLevel(pool.live_bytes, pool.stranded_bytes, pool.peak_live_bytes, pool.retries or 0)
        before = found.get(pool.device_uuid)
        found[pool.device_uuid] = level if before is None else _sum(before, level)
    return found


def read() -> dict[str, DeviceLevel] | None:
    """Return the current levels; None while a flush is in progress. Never raises."""
    try:
        pools = REGISTRY.read(READ_SECONDS)
    except Exception:  # an error of an allocator, which the program did not call
        return None
    return None if pools is None else levels(pools)


def _sum(one: DeviceLevel, other: DeviceLevel) -> DeviceLevel:
    peaks = (one.peak_bytes, other.peak_bytes)
    return DeviceLevel(
        one.live_bytes + other.live_bytes,
        one.stranded_bytes + other.stranded_bytes,
        None if None in peaks else sum(peak or 0 for peak in peaks),
        one.retries + other.retries,
        alone=False,
    )
