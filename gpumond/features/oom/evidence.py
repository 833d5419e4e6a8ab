"""The facts of one out-of-memory error, of which its case file consists. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from gpumond.facts.engines import EngineReading
from gpumond.facts.frame import Frame, Ledger, Line, Verdict
from gpumond.facts.pools import PoolUsage
from gpumond.facts.program import LiveClasses, Oom, OomPool
from gpumond.facts.snapshot import AgentReport, DeviceReading, Snapshot

SEGMENT_BYTES = 2 << 20
"""Granularity in which allocators take memory from a device."""


@dataclass(frozen=True, slots=True)
class NeighborUsage:
    """Bytes that another program on the device holds, and the part that a flush of it returns."""

    report: AgentReport
    held_bytes: int
    reclaimable_bytes: int


@dataclass(frozen=True)  # without slots, for the cached properties
class Evidence:
    """``before`` is the last frame before the error, ``report`` the program's with the record ``oom``.

    ``verdicts`` are those of the frame of the report.
    """

    oom: Oom
    report: AgentReport
    before: Frame
    verdicts: Sequence[Verdict] = ()

    @property
    def snapshot(self) -> Snapshot:
        return self.before.snapshot

    @property
    def ledger(self) -> Ledger:
        return self.before.ledger

    @cached_property
    def uuid(self) -> str | None:
        """The device that was full; that of the only pool if the record does not state it."""
        if self.oom.device_uuid is not None:
            return self.oom.device_uuid
        pools = self.oom.pools or self.report.pools or (self.earlier.pools if self.earlier else ())
        uuids = {pool.device_uuid for pool in pools}
        return uuids.pop() if len(uuids) == 1 else None

    @cached_property
    def device(self) -> DeviceReading | None:
        return None if self.uuid is None else self.snapshot.device(self.uuid)

    @cached_property
    def earlier(self) -> AgentReport | None:
        """The program's last report before the error."""
        return self.snapshot.reports_by_process.get(self.report.key)

    @cached_property
    def pools(self) -> list[OomPool]:
        """The program's pools on the device at the error."""
        return [pool for pool in self.oom.pools if self.uuid in (None, pool.device_uuid)]

    @cached_property
    def live(self) -> int:
        return sum(pool.live_bytes for pool in self.pools)

    @cached_property
    def held(self) -> int:
        return self.live + sum(pool.cached_bytes + pool.stranded_bytes for pool in self.pools)

    @cached_property
    def failed(self) -> OomPool | None:
        """The pool of the allocator that failed; the only one if the record does not state it."""
        named = [pool for pool in self.pools if pool.allocator == self.oom.allocator]
        return named[0] if len(named) == 1 else self.pools[0] if len(self.pools) == 1 else None

    @property
    def request(self) -> int | None:
        return self.oom.request_bytes

    @cached_property
    def free(self) -> int | None:
        """Free bytes of the device at the error: as stated there, else those before it less the program's growth."""
        if self.oom.seen == "oom_pool":
            return 0  # it is used only when nothing else is left
        if self.oom.free_bytes is not None:
            return self.oom.free_bytes
        free = None if self.device is None else self.device.current_free_bytes
        if free is None or not self.pools:
            return free
        held = sum(pool.held_bytes for pool in self._own_pools(self.earlier) if pool.inside is None)
        return max(0, free - (self.held - held))

    @cached_property
    def limit(self) -> tuple[int, str | None] | None:
        """The lowest limit of the allocator on the device, and what has set it: the name of a quota, an empty text for
        `gpumond limit`, None for a function or setting of the library.
        """
        allocators = {self.failed.allocator} if self.failed else {pool.allocator for pool in self.pools}
        own = [each for each in self.report.limits if each.device_uuid == self.uuid and each.allocator in allocators]
        limits: list[tuple[int, str | None]] = [(each.limit_bytes, each.quota) for each in own]
        if self.oom.limit_bytes is not None:
            limits.append((self.oom.limit_bytes, None))
        return min(limits, key=lambda each: each[0], default=None)

    @cached_property
    def limited_by(self) -> int:
        """Bytes by which the request exceeds the allocator's limit, while the device has room for it; else 0."""
        if self.limit is None or self.request is None:
            return 0
        pool = self.failed
        held = 0 if pool is None else pool.live_bytes + pool.cached_bytes + pool.stranded_bytes
        over = held + self.request - self.limit[0]
        return over if over > 0 and (self.free is None or self.free >= self.request) else 0

    @cached_property
    def missing(self) -> int | None:
        """Bytes that the request lacked; None if unknown."""
        if self.limited_by:
            return self.limited_by
        if self.request is None or self.free is None:
            return None
        return max(0, -(-self.request // SEGMENT_BYTES) * SEGMENT_BYTES - self.free)

    @cached_property
    def others(self) -> list[NeighborUsage]:
        """The other programs with an agent on the device, the largest part that can be reclaimed first."""
        device = self.device
        found = []
        for report in self.snapshot.reports_by_device.get(device.uuid, ()) if device else ():
            if report.key != self.report.key and device is not None:
                flushable = report.flush_policy != "never" and not report.suspended
                reclaimable = self.snapshot.reclaimable_from(report, device) if flushable else 0
                found.append(NeighborUsage(report, self.snapshot.used_by(report.key, device) or 0, reclaimable))
        return sorted(found, key=lambda each: -each.reclaimable_bytes)

    @cached_property
    def held_by_others(self) -> int:
        """Bytes of the device that other programs and unknown owners hold."""
        return sum(line.used_bytes for line in self.lines if line.process != self.report.key)

    @cached_property
    def overhead(self) -> int:
        """The program's bytes outside its pools before the error, which include what its pools gained since its last
        report: at most what the device has besides the pools and the others.
        """
        own = (line for line in self.lines if line.process == self.report.key and line.share == "overhead")
        before = sum(line.used_bytes for line in own)
        if self.device is None or self.device.size_bytes is None or self.free is None:
            return before
        return max(0, min(before, self.device.size_bytes - self.free - self.held - self.held_by_others))

    @cached_property
    def lines(self) -> list[Line]:
        """The ledger of the device."""
        return [line for line in self.ledger.lines if line.device_uuid == self.uuid]

    @cached_property
    def classes(self) -> LiveClasses | None:
        known = [one for one in self.oom.classes if self.uuid in (None, one.device_uuid)]
        return max(known, key=lambda one: one.live_bytes, default=None)

    @cached_property
    def activations(self) -> int:
        """Bytes of activations, with those of other tensors where these are not distinguished."""
        one = self.classes
        if one is None or one.buffers_bytes is None:
            return 0
        return one.unknown_bytes if one.activations_bytes is None else one.activations_bytes

    @cached_property
    def batch_dependent(self) -> int:
        """Activations; for inference also the results of a model, which are tensors outside the graph."""
        results = 0 if self.classes is None or not self.inference else self.classes.tensors_bytes or 0
        return self.activations + results

    @property
    def inference(self) -> bool:
        """Return whether a model runs without a graph; in a first forward pass of training, there are activations."""
        one = self.classes
        if one is None or self.training or not one.parameters_bytes or one.activations_bytes is None:
            return False
        return one.activations_bytes < one.live_bytes / 20  # the allocator's rounding and workspaces

    @property
    def training(self) -> bool:
        return self.classes is not None and bool(self.classes.gradients_bytes or self.classes.optimizer_bytes)

    def engines(self) -> Iterator[tuple[EngineReading, int]]:
        """Yield the serving engines on the device, each with its bytes there."""
        for engine in self.snapshot.engines:
            for device, used in self.snapshot.used_by_engine(engine):
                if device.uuid == self.uuid:
                    yield engine, used

    def enough(self, size: int | None) -> bool | None:
        """Return whether these bytes are at least the missing ones."""
        return None if size is None or self.missing is None else size >= self.missing

    def _own_pools(self, report: AgentReport | None) -> Iterator[PoolUsage]:
        return (pool for pool in (report.pools if report else ()) if pool.device_uuid == self.uuid)

    @cached_property
    def earlier_pools(self) -> list[PoolUsage]:
        return list(self._own_pools(self.earlier))
