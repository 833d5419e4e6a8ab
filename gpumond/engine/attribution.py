"""Attribution of every used byte of every device to a line of the ledger. No I/O.

The driver reports the memory of each device and each process; agents report its live, cached and stranded part. Both
are read at different times and either can be wrong, so a disagreement is kept as overcount and not clamped away, except
that the live bytes of a process never exceed the driver's count for it:

    sum of a device's lines = its used bytes + its overcount,    every line >= 0

Unmapped bytes are not part of used, and have no line.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from gpumond.model.claims import complete_lists, is_confirmed, limit, outermost, slack
from gpumond.model.cooperative import Steps, synchronous
from gpumond.model.frame import Ledger, Line, Overcount, Share
from gpumond.model.pools import PoolUsage
from gpumond.model.process import ProcessKey
from gpumond.model.snapshot import AgentReport, DeviceReading, Snapshot


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
REPORTS_AT_ONCE = 16
"""Reports whose pools are split in one step: 0.1 ms."""


def _new_line(uuid: str, share: Share, used: int, process: ProcessKey, workload: str) -> Line:
    pid, start_ticks = process
    return Line(device_uuid=uuid, share=share, used_bytes=used, pid=pid, start_ticks=start_ticks, workload=workload)


_line = lru_cache(16_384)(_new_line)
"""Most lines except the live ones are equal in consecutive ticks, and a lookup is faster than a new object."""


def attributing(snapshot: Snapshot) -> Steps[Ledger]:
    """Make the ledger of a snapshot. A device whose used bytes are unknown has no ``unclaimed`` line and no
    overcount.
    """
    reports = snapshot.reports_by_process
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


def _pools_by_device(snapshot: Snapshot) -> Steps[Mapping[str, dict[ProcessKey, _Pools]]]:
    """Return the pools of every process by device; a MIG instance's also count for its parent, as its bytes do."""
    parents = {device.uuid: device.parent_uuid for device in snapshot.devices if device.parent_uuid is not None}
    table: defaultdict[str, dict[ProcessKey, _Pools]] = defaultdict(dict)
    for number, (process, report) in enumerate(snapshot.reports_by_process.items()):
        if number % REPORTS_AT_ONCE == 0:
            yield
        for pool in outermost(report.pools):
            uuid: str | None = pool.device_uuid
            shares = _shares(pool)
            while uuid is not None:
                own = table[uuid]
                before = own.get(process)
                own[process] = _Pools(*map(sum, zip(before, shares, strict=True))) if before else shares
                uuid = parents.get(uuid)
    return table


def _bounded(device: DeviceReading, pools: Mapping[ProcessKey, _Pools], complete: bool) -> dict[ProcessKey, _Pools]:
    """Return the claims on one device, each limited to the driver's count for its process."""
    counts, tolerated = device.counts, slack(device)
    found: dict[ProcessKey, _Pools] = {}
    for process, own in pools.items():
        if is_confirmed(counts, process, complete):
            most = limit(device, counts, process)
            if most is not None and own.held > most + tolerated:
                own = own.at_most(most)
            elif most is not None and own.live > most:
                own = own._replace(live=most)
            found[process] = own
    return found


def _shares(pool: PoolUsage) -> _Pools:
    """Split the pool's held bytes into three parts; a report that does not add up is corrected."""
    held, live, cached = pool.held_bytes, pool.live_bytes, pool.reclaimable.likely
    if live + cached > held:
        live = min(live, held)
        cached = min(cached, held - live)
    return _Pools(live, cached, held - live - cached)


def _process_lines(
    device: DeviceReading, reports: Mapping[ProcessKey, AgentReport], pools: Mapping[ProcessKey, _Pools]
) -> list[Line]:
    uuid, listed = device.uuid, device.processes_by_key
    lines: list[Line] = []
    for process, usage in listed.items():
        used, report = usage.used_bytes, reports.get(process)
        if report is not None and report.pools:
            own = pools.get(process, _NONE)
            lines += _agent_lines(uuid, process, report.workload, own)
            if used is not None:
                lines.append(_line(uuid, "overhead", max(0, used - own.held), process, report.workload))
        elif used is not None:
            # An agent without a pool has no information about the process.
            lines.append(_line(uuid, "opaque", used, process, report.workload if report else ""))
    for process, own in pools.items():
        if process not in listed:
            lines += _agent_lines(uuid, process, reports[process].workload, own)
    return lines


def _agent_lines(uuid: str, process: ProcessKey, workload: str, pools: _Pools) -> tuple[Line, Line, Line]:
    return (
        _new_line(uuid, "live", pools.live, process, workload),
        _line(uuid, "cached", pools.cached, process, workload),
        _line(uuid, "stranded", pools.stranded, process, workload),
    )


def _seen_bytes(device: DeviceReading, pools: Mapping[ProcessKey, _Pools]) -> int:
    """Return the bytes that visible processes own: the driver's count of each, else its agent's."""
    counted = {key: each.used_bytes for key, each in device.processes_by_key.items() if each.used_bytes is not None}
    return sum(counted.values()) + sum(own.held for process, own in pools.items() if process not in counted)
