"""Flushes without benefit: the program allocates the released memory again at once.

Without I/O; the time is an argument. The counts grow from the start of the process, as do all counters of a report.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from gpumond.facts.messages import PoolChange
from gpumond.facts.pools import PoolUsage

SECONDS = 10.0
RATIO = 0.5
"""Part of the released bytes that, taken from the driver again within `SECONDS`, counts as thrash."""

PoolKey = tuple[str, str]
"""Allocator and device UUID."""


class Release(NamedTuple):
    """A pool just after a flush."""

    after: PoolUsage
    released_bytes: int
    until: float

    def taken_again(self, pool: PoolUsage) -> bool:
        allocated = pool.device_allocations is None or pool.device_allocations != self.after.device_allocations
        return allocated and pool.held_bytes - self.after.held_bytes >= RATIO * self.released_bytes


class Thrash:
    def __init__(self) -> None:
        self._releases: dict[PoolKey, Release] = {}
        self._counts: dict[PoolKey, int] = {}

    def flushed(self, changes: Iterable[PoolChange], now: float) -> None:
        for change in changes:
            released = change.before.held_bytes - change.after.held_bytes
            if released > 0:
                self._releases[_pool_key(change.after)] = Release(change.after, released, now + SECONDS)

    def counted(self, pools: Sequence[PoolUsage], now: float) -> Iterable[PoolUsage]:
        """Return the pools, each with its number of thrashes."""
        return self._counted(pools, now) if self._releases or self._counts else pools

    def _counted(self, pools: Iterable[PoolUsage], now: float) -> Iterator[PoolUsage]:
        for pool in pools:
            name = _pool_key(pool)
            release = self._releases.get(name)
            if release is not None and (now > release.until or release.taken_again(pool)):
                del self._releases[name]
                if now <= release.until:
                    self._counts[name] = self._counts.get(name, 0) + 1
            yield replace(pool, thrashes=self._counts[name]) if name in self._counts else pool


def _pool_key(pool: PoolUsage) -> PoolKey:
    return pool.allocator, pool.device_uuid
