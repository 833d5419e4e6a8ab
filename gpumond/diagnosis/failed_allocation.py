"""What a failed allocation ran into: the device's size, or the program's own limit. No I/O.

The events and alerts of out-of-memory errors and their cases derive from `FailedAllocation`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from gpumond.facts.frame import Frame
from gpumond.facts.pools import PoolUsage
from gpumond.facts.program import Oom, OomPool
from gpumond.facts.snapshot import AgentReport, CgroupLimit, DeviceReading, Snapshot


@dataclass(frozen=True)  # without slots, for the cached properties
class FailedAllocation:
    """``frame_before`` is the last frame before the error, ``report`` the program's with the record ``oom``."""

    oom: Oom
    report: AgentReport
    frame_before: Frame

    @property
    def snapshot(self) -> Snapshot:
        return self.frame_before.snapshot

    @cached_property
    def uuid(self) -> str | None:
        """The device that was full; that of the only pool if the record does not state it."""
        if self.oom.device_uuid is not None:
            return self.oom.device_uuid
        pools = self.oom.pools or self.report.pools or (self.earlier_report.pools if self.earlier_report else ())
        uuids = {pool.device_uuid for pool in pools}
        return uuids.pop() if len(uuids) == 1 else None

    @cached_property
    def device(self) -> DeviceReading | None:
        return None if self.uuid is None else self.snapshot.device(self.uuid)

    @cached_property
    def earlier_report(self) -> AgentReport | None:
        """The program's last report before the error."""
        return self.snapshot.reports_by_process.get(self.report.key)

    @cached_property
    def pools(self) -> list[OomPool]:
        """The program's pools on the device at the error."""
        return [pool for pool in self.oom.pools if self.uuid in (None, pool.device_uuid)]

    @cached_property
    def live_bytes(self) -> int:
        return sum(pool.live_bytes for pool in self.pools)

    @cached_property
    def held_bytes(self) -> int:
        return self.live_bytes + sum(pool.cached_bytes + pool.stranded_bytes for pool in self.pools)

    @cached_property
    def failed_pool(self) -> OomPool | None:
        """The pool of the allocator that failed; the only one if the record does not state it."""
        matching = [pool for pool in self.pools if pool.allocator == self.oom.allocator]
        return matching[0] if len(matching) == 1 else self.pools[0] if len(self.pools) == 1 else None

    @property
    def request_bytes(self) -> int | None:
        return self.oom.request_bytes

    @cached_property
    def free_bytes(self) -> int | None:
        """Free bytes of the device at the error: as stated there, else those before it less the program's growth."""
        if self.oom.seen == "oom_pool":
            return 0  # it is used only when nothing else is left
        if self.oom.free_bytes is not None:
            return self.oom.free_bytes
        free = None if self.device is None else self.device.current_free_bytes
        return None if free is None else max(0, free - self.grown_bytes)

    @cached_property
    def grown_bytes(self) -> int:
        """Bytes by which the program's pools have grown since its last report before the error."""
        if not self.pools:
            return 0
        grown = self.held_bytes - sum(
            pool.held_bytes for pool in self._own_pools(self.earlier_report) if pool.inside is None
        )
        return max(0, grown) if self.is_from_later_report else grown

    @cached_property
    def cgroup(self) -> CgroupLimit | None:
        """The limit of the program's cgroup, if the request exceeded it and the device had room."""
        for each in self.device.cgroup_limits if self.device else ():
            if self.report.pid in each.pids and each.limit_bytes is not None and each.used_bytes is not None:
                room_bytes = each.limit_bytes - each.used_bytes - self.grown_bytes
                if (
                    self.request_bytes is not None
                    and room_bytes < self.request_bytes
                    and (self.free_bytes is None or self.request_bytes <= self.free_bytes)
                ):
                    return each
        return None

    @property
    def is_from_later_report(self) -> bool:
        """Return whether the record is of a later report: the program may have freed memory since its error."""
        return self.oom.seen == "counter"

    @cached_property
    def limit(self) -> tuple[int, str | None] | None:
        """The lowest limit of the allocator on the device, and what has set it: the name of a quota, an empty text for
        `gpumond limit`, None for a function or setting of the library.
        """
        allocators = {self.oom.allocator, *(pool.allocator for pool in self.pools)}
        if self.failed_pool:
            allocators = {self.failed_pool.allocator}
        own = [each for each in self.report.limits if each.device_uuid == self.uuid and each.allocator in allocators]
        limits: list[tuple[int, str | None]] = [(each.limit_bytes, each.quota) for each in own]
        if self.oom.limit_bytes is not None:
            limits.append((self.oom.limit_bytes, None))
        return min(limits, key=lambda each: each[0], default=None)

    @cached_property
    def reached_bytes(self) -> int:
        """Bytes that the allocator that failed held at the error; its peak if it may have freed some since."""
        pool = self.failed_pool
        held = 0 if pool is None else pool.live_bytes + pool.cached_bytes + pool.stranded_bytes
        return max((held, *(each.peak_held_bytes or each.held_bytes for each in self.peak_pools)))

    @cached_property
    def peak_pools(self) -> list[PoolUsage]:
        """The pools of the allocator that failed whose peaks stand for their bytes at the error."""
        pools = (*self._own_pools(self.report), *self.earlier_pools) if self.is_from_later_report else ()
        return [each for each in pools if self.oom.allocator in ("", each.allocator)]

    @cached_property
    def is_limited(self) -> bool:
        """Return whether the allocator reached its own limit before the device was full."""
        if self.limit is None:
            return False
        room_bytes = self.limit[0] - self.reached_bytes
        if self.request_bytes is None:
            return self.free_bytes is not None and self.free_bytes > room_bytes
        return self.request_bytes > room_bytes and (self.free_bytes is None or self.free_bytes >= self.request_bytes)

    @property
    def limit_reached_bytes(self) -> int | None:
        """The limit that the allocator reached; None if the device was full."""
        return self.limit[0] if self.is_limited and self.limit is not None else None

    def _own_pools(self, report: AgentReport | None) -> Iterator[PoolUsage]:
        return (pool for pool in (report.pools if report else ()) if pool.device_uuid == self.uuid)

    @cached_property
    def earlier_pools(self) -> list[PoolUsage]:
        return list(self._own_pools(self.earlier_report))
