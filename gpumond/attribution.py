"""Who holds what: every used byte of every device gets a line. Pure.

The driver says how much a device and each process use; agents say what of it is live, cached or
stranded. Both are read moments apart and either can be wrong, so a disagreement is kept as
overcount instead of being clamped away:

    sum of a device's lines = its used bytes + its overcount,    every line >= 0
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from gpumond.model import AgentReport, DeviceReading, Ledger, Line, Overcount, PoolUsage, Share, Snapshot

Identity = tuple[int, int | None]
"""(pid, start_ticks)"""


class _Pools(NamedTuple):
    """What the agent of one process says about one device, summed over its allocators."""

    live: int = 0
    cached: int = 0
    stranded: int = 0

    @property
    def held(self) -> int:
        return self.live + self.cached + self.stranded

    def __add__(self, other: object) -> _Pools:
        assert isinstance(other, _Pools)
        return _Pools(self.live + other.live, self.cached + other.cached, self.stranded + other.stranded)


def attribute(snapshot: Snapshot) -> Ledger:
    """The ledger of one snapshot. A device whose used bytes are unknown has no ``unclaimed`` and no overcount."""
    reports: dict[Identity, AgentReport] = {(report.pid, report.start_ticks): report for report in snapshot.reports}
    pools = _pools_by_device(snapshot)
    lines: list[Line] = []
    overcounts: list[Overcount] = []
    for device in snapshot.devices:
        own = list(_process_lines(device, reports, pools[device.uuid]))
        if device.used_bytes is not None:
            unclaimed = max(0, device.used_bytes - _seen_bytes(device, pools[device.uuid]))
            own.append(Line(device.uuid, "unclaimed", unclaimed))
            overcounts.append(Overcount(device.uuid, sum(line.used_bytes for line in own) - device.used_bytes))
        lines += own
    return Ledger(tuple(lines), tuple(overcounts))


def outermost(pools: Iterable[PoolUsage]) -> Iterator[PoolUsage]:
    """The pools of one process without those that allocate from another of them (CuPy on RMM, say)."""
    pools = tuple(pools)
    present = {(pool.allocator, pool.device_uuid) for pool in pools}
    for pool in pools:
        if pool.inside == pool.allocator or (pool.inside, pool.device_uuid) not in present:
            yield pool


def _pools_by_device(snapshot: Snapshot) -> Mapping[str, dict[Identity, _Pools]]:
    """Pools of every process on every device; a MIG instance's also count to its parent, as its bytes do."""
    parents = {device.uuid: device.parent_uuid for device in snapshot.devices}
    table: defaultdict[str, dict[Identity, _Pools]] = defaultdict(dict)
    for report in snapshot.reports:
        identity = (report.pid, report.start_ticks)
        for pool in outermost(report.pools):
            shares = _shares(pool)
            for uuid in (pool.device_uuid, parents.get(pool.device_uuid)):
                if uuid is not None:
                    table[uuid][identity] = table[uuid].get(identity, _Pools()) + shares
    return table


def _shares(pool: PoolUsage) -> _Pools:
    """The pool's held bytes in three parts; a report that does not add up is made to."""
    live = min(pool.live_bytes, pool.held_bytes)
    cached = min(pool.reclaimable.likely, pool.held_bytes - live)
    return _Pools(live, cached, pool.held_bytes - live - cached)


def _process_lines(
    device: DeviceReading, reports: Mapping[Identity, AgentReport], pools: Mapping[Identity, _Pools]
) -> Iterator[Line]:
    listed: set[Identity] = set()
    for process in device.processes or ():
        identity = (process.pid, process.start_ticks)
        listed.add(identity)
        report = reports.get(identity)
        if report is not None and report.pools:
            own = pools.get(identity, _Pools())
            yield from _agent_lines(device.uuid, report, own)
            if process.used_bytes is not None:
                overhead = max(0, process.used_bytes - own.held)
                yield Line(device.uuid, "overhead", overhead, process.pid, report.workload)
        elif process.used_bytes is not None:
            # An agent that sees no pool knows nothing of the process either.
            workload = report.workload if report else ""
            yield Line(device.uuid, "opaque", process.used_bytes, process.pid, workload)
    for identity, own in pools.items():
        if identity not in listed:
            yield from _agent_lines(device.uuid, reports[identity], own)


def _agent_lines(uuid: str, report: AgentReport, pools: _Pools) -> Iterator[Line]:
    parts: tuple[tuple[Share, int], ...] = (
        ("live", pools.live),
        ("cached", pools.cached),
        ("stranded", pools.stranded),
    )
    for share, used in parts:
        yield Line(uuid, share, used, report.pid, report.workload)


def _seen_bytes(device: DeviceReading, pools: Mapping[Identity, _Pools]) -> int:
    """Bytes of the device that some visible process owns: the driver's count, else its agent's."""
    seen = 0
    listed: set[Identity] = set()
    for process in device.processes or ():
        identity = (process.pid, process.start_ticks)
        listed.add(identity)
        held = pools[identity].held if identity in pools else 0
        seen += held if process.used_bytes is None else process.used_bytes
    return seen + sum(own.held for identity, own in pools.items() if identity not in listed)
