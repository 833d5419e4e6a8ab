"""Attribution of every used byte of every device to a line of the ledger. No I/O.

The driver reports the memory of each device and each process; agents report its live, cached and stranded part. Both
are read at different times and either can be wrong, so a disagreement is kept as overcount and not clamped away, except
that the live bytes of a process never exceed the driver's count for it:

    sum of a device's lines = its used bytes + its overcount,    every line >= 0

Unmapped bytes are not part of used, and have no line. Managed memory (cudaMallocManaged) is on the device or on the
host: agents state it, and the driver counts the part on the device for no process. It is attributed as far as there are
used bytes without another owner. So is the memory of a suspended process that is being restored.

A report is up to a second older than the reading. What a process has taken from the driver since, as after a flush, no
agent has stated yet: it is opaque, and not overhead. What it has returned since was cached.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from gpumond.facts.frame import Frame, Ledger, LedgerLine, Overcount
from gpumond.facts.pools import PoolUsage
from gpumond.facts.program import ProcessKey
from gpumond.facts.shares import Share
from gpumond.facts.snapshot import AgentReport, DeviceReading, Overhead, Snapshot, Suspension
from gpumond.tick.claims import (
    claim_tolerance_bytes,
    fully_listed_devices,
    held_bytes_by_device,
    max_possible_bytes,
    may_hold_memory,
    outermost_pools,
    resident_managed_bytes,
)


class _PoolSums(NamedTuple):
    """Pools of one process on one device, summed over its allocators.

    ``opaque``: held bytes of pools whose live bytes are unknown. ``pools_with_parts``: number of the other pools.
    ``unsized_pools``: number of pools whose held bytes are unknown as well.
    """

    live: int = 0
    cached: int = 0
    stranded: int = 0
    opaque: int = 0
    pools_with_parts: int = 0
    unsized_pools: int = 0

    @property
    def held(self) -> int:
        return self.live + self.cached + self.stranded + self.opaque

    def plus(self, other: _PoolSums) -> _PoolSums:
        return _PoolSums(*map(sum, zip(self, other, strict=True)))

    def resized(self, held: int) -> _PoolSums:
        """Return the pools after a change to this size: what was added is opaque, and what was freed was cached."""
        growth = held - self.held
        if growth == 0:
            return self
        if growth > 0:
            return self._replace(opaque=self.opaque + growth)
        return self._replace(cached=max(0, self.cached + growth)).at_most(held)

    def at_most(self, held: int) -> _PoolSums:
        live = min(self.live, held)
        cached = min(self.cached, held - live)
        stranded = min(self.stranded, held - live - cached)
        opaque = min(self.opaque, held - live - cached - stranded)
        return self._replace(live=live, cached=cached, stranded=stranded, opaque=opaque)


_NO_POOLS = _PoolSums()


def _process_line(uuid: str, share: Share, used: int, process: ProcessKey, workload: str) -> LedgerLine:
    pid, start_ticks = process
    return LedgerLine(
        device_uuid=uuid, share=share, used_bytes=used, pid=pid, start_ticks=start_ticks, workload=workload
    )


class _PreviousFrame:
    """The previous frame: of each process, the overhead, and what no agent stated."""

    def __init__(self, frame: Frame, now: float) -> None:
        self._age_seconds = now - frame.snapshot.elapsed_seconds
        self._counts = {device.uuid: device.used_by_process for device in frame.snapshot.devices}
        self.overheads: defaultdict[str, dict[tuple[int | None, int | None], int]] = defaultdict(dict)
        """By device and process, pid and start."""
        self._opaque: defaultdict[str, dict[tuple[int | None, int | None], int]] = defaultdict(dict)
        for line in frame.ledger.lines:
            if line.share in ("overhead", "opaque"):
                table = self.overheads if line.share == "overhead" else self._opaque
                table[line.device_uuid][line.pid, line.start_ticks] = line.used_bytes

    def overhead(self, uuid: str, process: ProcessKey, age_seconds: float, used: int, held: int) -> int:
        """Return the overhead of a process whose driver's count is ``used``, and whose report states ``held``. The
        process had an overhead in the previous frame.

        The overhead changes only as far as a new report confirms it: at the time of a report, the driver's count was
        between those of the readings before and after it, unless it has fallen and risen, as in a flush. A report that
        is older than the previous reading says nothing new.
        """
        overhead, before = self.overheads[uuid][process], self._counts[uuid].get(process)
        if before is None:
            return max(0, used - held)
        if age_seconds < self._age_seconds:
            max_overhead = overhead + self._opaque[uuid].get(process, 0)
            overhead = min(overhead, max(0, before - held, used - held))
            if used >= before:
                overhead = max(overhead, min(before - held, max_overhead))
        return min(used, overhead)


def make_ledger(snapshot: Snapshot, previous: Frame | None = None) -> Ledger:
    """Make the ledger of a snapshot. A device whose used bytes are unknown has no ``unattributed`` line and no
    overcount. Without the ``previous`` frame, the overhead contains what its process has taken since its report.
    """
    earlier = _PreviousFrame(previous, snapshot.elapsed_seconds) if previous else None
    reports = snapshot.reports_by_process
    pools = _pools_by_device(snapshot, counted=True)
    uncounted = _pools_by_device(snapshot, counted=False)
    fully_listed = fully_listed_devices(snapshot.devices, snapshot.faults, snapshot.private_pid_namespace)
    lines: list[LedgerLine] = []
    overcounts: list[Overcount] = []
    for device in snapshot.devices:
        claims = _limit_to_driver_counts(device, pools[device.uuid], device.uuid in fully_listed)
        unattributed = max(0, (device.used_bytes or 0) - _attributed_bytes(device, claims))
        uncounted_pools = _uncounted_on_device(
            device, uncounted[device.uuid], device.uuid in fully_listed, snapshot.possibly_suspended, unattributed
        )
        unattributed -= sum(sums.held for sums in uncounted_pools.values())
        device_lines = _process_lines(device, reports, claims, uncounted_pools, earlier)
        if device.used_bytes is not None:
            device_lines.append(LedgerLine(device_uuid=device.uuid, share="unattributed", used_bytes=unattributed))
            overcounts.append(Overcount(device.uuid, sum(line.used_bytes for line in device_lines) - device.used_bytes))
        lines += device_lines
    return Ledger(tuple(lines), tuple(overcounts))


def _uncounted_on_device(
    device: DeviceReading,
    pools: Mapping[ProcessKey, _PoolSums],
    is_fully_listed: bool,
    suspended: Collection[ProcessKey],
    unattributed: int,
) -> dict[ProcessKey, _PoolSums]:
    """Return the pools that the driver does not count for their process, as far as they are attributed to it."""
    held = {
        process: sums.held
        for process, sums in pools.items()
        if sums.held and (process in suspended or may_hold_memory(device.used_by_process, process, is_fully_listed))
    }
    return {
        process: pools[process].at_most(size) for process, size in resident_managed_bytes(held, unattributed).items()
    }


def _pools_by_device(snapshot: Snapshot, counted: bool) -> defaultdict[str, dict[ProcessKey, _PoolSums]]:
    """Return the pools of every process by device; a MIG instance's also count for its parent, as its bytes do.

    ``counted``: those that the driver counts for their process, else only the others: managed memory, and pools of
    suspended processes.
    """
    parents = {device.uuid: device.parent_uuid for device in snapshot.devices if device.parent_uuid is not None}
    table: defaultdict[str, dict[ProcessKey, _PoolSums]] = defaultdict(dict)
    suspended = {(each.device_uuid, each.process) for each in snapshot.suspensions}
    for process, report in snapshot.reports_by_process.items():
        for pool in outermost_pools(report.pools):
            if (pool.managed or (bool(suspended) and (pool.device_uuid, process) in suspended)) is counted:
                continue
            uuid: str | None = pool.device_uuid
            shares = _pool_sums(pool)
            while uuid is not None:
                sums_by_process = table[uuid]
                before = sums_by_process.get(process)
                sums_by_process[process] = before.plus(shares) if before else shares
                uuid = parents.get(uuid)
    return table


def _limit_to_driver_counts(
    device: DeviceReading, pools: Mapping[ProcessKey, _PoolSums], is_fully_listed: bool
) -> dict[ProcessKey, _PoolSums]:
    """Return the claims on one device, each limited to the driver's count for its process."""
    counts, tolerance = device.used_by_process, claim_tolerance_bytes(device)
    limited: dict[ProcessKey, _PoolSums] = {}
    for process, sums in pools.items():
        if may_hold_memory(counts, process, is_fully_listed):
            max_bytes = max_possible_bytes(device, counts, process)
            if max_bytes is not None and sums.held > max_bytes + tolerance:
                sums = sums.at_most(max_bytes)
            elif max_bytes is not None and sums.live > max_bytes:
                sums = sums._replace(live=max_bytes)
            limited[process] = sums
    return limited


def _pool_sums(pool: PoolUsage) -> _PoolSums:
    """Split the pool's held bytes into three parts; a report that does not add up is corrected."""
    held, live, cached = pool.held_bytes, pool.live_bytes, pool.reclaimable.likely
    if live is None:
        return _PoolSums(opaque=held, unsized_pools=not pool.held_known)
    if live + cached > held:
        live = min(live, held)
        cached = min(cached, held - live)
    return _PoolSums(live, cached, held - live - cached, 0, 1)


def _process_lines(
    device: DeviceReading,
    reports: Mapping[ProcessKey, AgentReport],
    pools: Mapping[ProcessKey, _PoolSums],
    uncounted: Mapping[ProcessKey, _PoolSums],
    earlier: _PreviousFrame | None,
) -> list[LedgerLine]:
    uuid, listed = device.uuid, device.processes_by_key
    overheads_before = earlier.overheads[uuid] if earlier else {}
    lines: list[LedgerLine] = []
    for process, usage in listed.items():
        used, report = usage.used_bytes, reports.get(process)
        if report is not None and report.pools:
            sums = pools.get(process, _NO_POOLS)
            overhead = 0 if used is None else max(0, used - sums.held)
            if sums.unsized_pools:  # all of it may be held bytes of that pool
                sums, overhead = sums._replace(opaque=sums.opaque + overhead), 0
            elif earlier and used is not None and overheads_before.get(process, overhead) != overhead:
                overhead = earlier.overhead(uuid, process, report.age_seconds, used, sums.held)
                sums = sums.resized(used - overhead if overhead else max(used, sums.held))
            all_sums = sums.plus(uncounted[process]) if process in uncounted else sums
            lines += _agent_lines(uuid, process, report.workload, all_sums)
            if used is not None and not sums.unsized_pools:
                lines.append(_process_line(uuid, "overhead", overhead, process, report.workload))
        elif used is not None:
            # An agent without a pool has no information about the process.
            lines.append(_process_line(uuid, "opaque", used, process, report.workload if report else ""))
    for process in {**pools, **uncounted}:
        if process not in listed:
            sums = pools.get(process, _NO_POOLS).plus(uncounted.get(process, _NO_POOLS))
            lines += _agent_lines(uuid, process, reports[process].workload, sums)
    return lines


def _agent_lines(uuid: str, process: ProcessKey, workload: str, pools: _PoolSums) -> Iterator[LedgerLine]:
    """Yield the lines of the process's pools. Without a pool whose parts are known, the parts have no line."""
    has_opaque = pools.opaque or pools.unsized_pools
    if pools.pools_with_parts or not has_opaque:
        yield _process_line(uuid, "live", pools.live, process, workload)
        yield _process_line(uuid, "cached", pools.cached, process, workload)
        yield _process_line(uuid, "stranded", pools.stranded, process, workload)
    if has_opaque:
        yield _process_line(uuid, "opaque", pools.opaque, process, workload)


def _attributed_bytes(device: DeviceReading, pools: Mapping[ProcessKey, _PoolSums]) -> int:
    """Return the bytes that visible processes own: the driver's count of each, else its agent's."""
    counted = {key: each.used_bytes for key, each in device.processes_by_key.items() if each.used_bytes is not None}
    return sum(counted.values()) + sum(sums.held for process, sums in pools.items() if process not in counted)


COMPONENT_TEXTS: Mapping[str, str] = {
    "nccl": "with NCCL",
    "graphs": "with CUDA graphs",
    "triton": "with Triton kernels",
}
"""Names of parts of an overhead, by the component that agents state. Other components are ignored."""
CONTEXT = "context"
MAX_CONTEXT_SECONDS = 30.0
"""Time after which a first value is not that of the context: the program has run for too long."""
SETTLING_SECONDS = 2.0
"""Time from the first sight of a component until its memory is allocated."""


def overheads_of_processes(
    devices: Sequence[DeviceReading],
    reports: Sequence[AgentReport],
    suspensions: Sequence[Suspension],
    previous: Snapshot | None,
    now: float,
) -> Iterator[Overhead]:
    """Yield the state of each process with an agent on each device that counts its memory."""
    if previous is None:
        return
    before = {(each.device_uuid, each.process): each for each in previous.overheads}
    yield from (before[key] for each in suspensions if (key := (each.device_uuid, each.process)) in before)
    by_process = {report.key: report for report in reports}
    for device in devices:
        for process, count in device.used_by_process.items():
            report = by_process.get(process)
            if report is None or count is None:
                continue
            state = before.get((device.uuid, process))
            if state is None:
                # Without an agent that was there before the context, nobody knows what the first value contains.
                prior = previous.device(device.uuid)
                if prior is None or process in prior.used_by_process or process not in previous.reports_by_process:
                    continue
                pid, start_ticks = process
                state = Overhead(device_uuid=device.uuid, pid=pid, start_ticks=start_ticks, began_at=now)
            after = _next_overhead(state, report, count, now)
            if after is not None:
                yield after


def _next_overhead(state: Overhead, report: AgentReport, count: int, now: float) -> Overhead | None:
    """Return the state after one reading, the same object while nothing changes; None if its parts cannot be known."""
    held = held_bytes_by_device(report.pools).get(state.device_uuid, 0)
    new = tuple(name for name in report.components if name in COMPONENT_TEXTS and name not in state.components)
    if new:
        state = replace(state, components=state.components + new, unsettled=state.unsettled + new, changed_at=now)
    if (count, held) != (state.counted_bytes, state.held_bytes):
        return replace(state, counted_bytes=count, held_bytes=held)
    size = count - held
    if size < 0 or (state.unsettled and now - state.changed_at < SETTLING_SECONDS):
        return state
    if not state.parts:
        if now - state.began_at > MAX_CONTEXT_SECONDS:
            return None
        return replace(state, parts=((CONTEXT, size),), settled_bytes=size, unsettled=())
    if not state.unsettled:
        return state if size == state.settled_bytes else replace(state, settled_bytes=size)
    name = " and ".join(COMPONENT_TEXTS[each] for each in state.unsettled).replace(" and with ", " and ")
    part = (name, max(0, size - state.settled_bytes))
    return replace(state, parts=(*state.parts, part), settled_bytes=size, unsettled=())


def overhead_parts(overhead: Overhead | None, size: int | None) -> tuple[tuple[str, int], ...] | None:
    """Return names and bytes of the parts of an overhead of ``size`` bytes, which are their sum; None if unknown."""
    if overhead is None or size is None or not overhead.parts:
        return None
    other = size - sum(part for _, part in overhead.parts)
    return (*overhead.parts, ("other", other)) if other >= 0 else None
