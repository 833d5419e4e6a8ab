"""Attribution of every used byte of every device to a line of the ledger. No I/O.

The driver reports the memory of each device and each process; agents report its live, cached and stranded part. Both
are read at different times and either can be wrong, so a disagreement is kept as overcount and not clamped away:

    sum of a device's lines = its used bytes + its overcount,    every line >= 0
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from gpumond.model.claims import borne_out, complete_lists, limit, listed, outermost, slack
from gpumond.model.cooperative import Steps, synchronous
from gpumond.model.frame import Ledger, Line, Overcount
from gpumond.model.pools import PoolUsage
from gpumond.model.snapshot import AgentReport, DeviceReading, Snapshot

Identity = tuple[int, int | None]
"""(pid, start_ticks)"""


class _Pools(NamedTuple):
    """Pools of one process on one device, summed over its allocators."""

    live: int
    cached: int
    stranded: int

    @property
    def held(self) -> int:
        return self.live + self.cached + self.stranded

    def at_most(self, held: int) -> _Pools:
        live = min(self.live, held)
        cached = min(self.cached, held - live)
        return _Pools(live, cached, min(self.stranded, held - live - cached))


_NONE = _Pools(0, 0, 0)

_line = lru_cache(16_384)(Line)
"""Most lines except the live ones are equal in consecutive ticks, and a lookup is faster than a new object."""


def attributing(snapshot: Snapshot) -> Steps[Ledger]:
    """Make the ledger of a snapshot. A device whose used bytes are unknown has no ``unclaimed`` line and no
    overcount.
    """
    reports: dict[Identity, AgentReport] = {(report.pid, report.start_ticks): report for report in snapshot.reports}
    yield
    pools = yield from _pools_by_device(snapshot)
    complete = complete_lists(snapshot.devices, snapshot.faults, snapshot.private_pid_namespace)
    yield
    lines: list[Line] = []
    overcounts: list[Overcount] = []
    for device in snapshot.devices:
        claims = _bounded(device, pools[device.uuid], device.uuid in complete)
        own = _process_lines(device, reports, claims)
        if device.used_bytes is not None:
            unclaimed = max(0, device.used_bytes - _seen_bytes(device, claims))
            own.append(Line(device_uuid=device.uuid, share="unclaimed", used_bytes=unclaimed))
            overcounts.append(Overcount(device.uuid, sum(line.used_bytes for line in own) - device.used_bytes))
        lines += own
        yield
    return Ledger(tuple(lines), tuple(overcounts))


attribute = synchronous(attributing)


def _pools_by_device(snapshot: Snapshot) -> Steps[Mapping[str, dict[Identity, _Pools]]]:
    """Return the pools of every process by device; a MIG instance's also count for its parent, as its bytes do."""
    parents = {device.uuid: device.parent_uuid for device in snapshot.devices if device.parent_uuid is not None}
    table: defaultdict[str, dict[Identity, _Pools]] = defaultdict(dict)
    for report in snapshot.reports:
        yield
        identity = (report.pid, report.start_ticks)
        for pool in outermost(report.pools):
            uuid: str | None = pool.device_uuid
            shares = _shares(pool)
            while uuid is not None:
                own = table[uuid]
                before = own.get(identity)
                own[identity] = _Pools(*map(sum, zip(before, shares, strict=True))) if before else shares
                uuid = parents.get(uuid)
    return table


def _bounded(device: DeviceReading, pools: Mapping[Identity, _Pools], complete: bool) -> dict[Identity, _Pools]:
    """Return the claims on one device, each limited to the driver's count for its process."""
    counts, tolerated = listed(device), slack(device)
    found: dict[Identity, _Pools] = {}
    for identity, own in pools.items():
        if borne_out(counts, identity, complete):
            most = limit(device, counts, identity)
            found[identity] = own if most is None or own.held <= most + tolerated else own.at_most(most)
    return found


def _shares(pool: PoolUsage) -> _Pools:
    """Split the pool's held bytes into three parts; a report that does not add up is corrected."""
    held, live, cached = pool.held_bytes, pool.live_bytes, pool.reclaimable.likely
    if live + cached > held:
        live = min(live, held)
        cached = min(cached, held - live)
    return _Pools(live, cached, held - live - cached)


def _process_lines(
    device: DeviceReading, reports: Mapping[Identity, AgentReport], pools: Mapping[Identity, _Pools]
) -> list[Line]:
    uuid, listed = device.uuid, set()
    lines: list[Line] = []
    for process in device.processes or ():
        identity, used = (process.pid, process.start_ticks), process.used_bytes
        listed.add(identity)
        report = reports.get(identity)
        if report is not None and report.pools:
            own = pools.get(identity, _NONE)
            lines += _agent_lines(uuid, report, own)
            if used is not None:
                lines.append(_line(uuid, "overhead", max(0, used - own.held), process.pid, report.workload))
        elif used is not None:
            # An agent without a pool has no information about the process.
            lines.append(_line(uuid, "opaque", used, process.pid, report.workload if report else ""))
    for identity, own in pools.items():
        if identity not in listed:
            lines += _agent_lines(uuid, reports[identity], own)
    return lines


def _agent_lines(uuid: str, report: AgentReport, pools: _Pools) -> tuple[Line, Line, Line]:
    pid, workload = report.pid, report.workload
    return (
        Line(device_uuid=uuid, share="live", used_bytes=pools.live, pid=pid, workload=workload),
        _line(uuid, "cached", pools.cached, pid, workload),
        _line(uuid, "stranded", pools.stranded, pid, workload),
    )


def _seen_bytes(device: DeviceReading, pools: Mapping[Identity, _Pools]) -> int:
    """Return the bytes that visible processes own: the driver's count of each, else its agent's."""
    counted = {
        (process.pid, process.start_ticks): process.used_bytes
        for process in device.processes or ()
        if process.used_bytes is not None
    }
    return sum(counted.values()) + sum(own.held for identity, own in pools.items() if identity not in counted)
