"""Memory use of the program by device, over all its allocators; scopes and steps compare these levels."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from gpumond.agent.registry import REGISTRY
from gpumond.facts.pools import PoolUsage
from gpumond.facts.program import RecentMemory

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
    """Return the levels by device. A pool inside another is counted there; one with unknown live bytes has no level."""
    found: dict[str, DeviceLevel] = {}
    for pool in pools:
        if pool.inside is not None or pool.live_bytes is None:
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


RECENT_SECONDS = 60.0


class RecentUsage:
    """Live and held bytes in the last minute, by device, of the pools whose live bytes reports have."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, dict[str, tuple[int, int]]]] = deque(maxlen=64)

    def add(self, now: float, pools: Sequence[PoolUsage]) -> None:
        """Add the pools of a report; ``now`` in seconds of the monotonic clock."""
        devices: dict[str, tuple[int, int]] = {}
        for pool in pools:
            if pool.inside is None and pool.live_bytes is not None:
                live, held = devices.get(pool.device_uuid, (0, 0))
                devices[pool.device_uuid] = (live + pool.live_bytes, held + pool.held_bytes)
        self._samples.append((now, devices))

    def before(self, now: float, device_uuid: str | None) -> RecentMemory | None:
        """Return the samples of one device, or the sum over all devices; None without samples."""
        recent = [(now - at, devices) for at, devices in list(self._samples) if now - at <= RECENT_SECONDS]
        if not recent:
            return None
        sums = [
            (age, [size for uuid, size in devices.items() if device_uuid in (None, uuid)]) for age, devices in recent
        ]
        return RecentMemory(
            tuple(round(age, 1) for age, _ in sums),
            tuple(sum(live for live, _ in sizes) for _, sizes in sums),
            tuple(sum(held for _, held in sizes) for _, sizes in sums),
        )
