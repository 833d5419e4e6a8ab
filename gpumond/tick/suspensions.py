"""Suspended processes (cuCheckpointProcess*, cuda-checkpoint), recognized by what the driver stops counting. No I/O.

The driver no longer lists a suspended process, and the bytes that it counted for it are free. The process continues to
exist, its agent stays connected and still states its pools, or is silent because its calls to the driver block. A
process that has closed its CUDA context differs: its agent reports that its pools are empty. Without an agent the two
cannot be told apart.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from gpumond.facts.pools import PoolUsage, Reclaimable
from gpumond.facts.process import ProcessKey
from gpumond.facts.snapshot import AgentReport, DeviceReading, Fault, ProcessUsage, Snapshot, Suspension
from gpumond.tick.claims import complete_lists, is_confirmed

SILENT_SECONDS = 3.0
"""Age from which a report is that of a silent agent: it would have reported twice since."""
UNDECIDED_SECONDS = 6.0
"""Longest time without evidence. After it, a process that the driver does not list is a process without memory."""


def suspending(
    reports: Sequence[AgentReport],
    silent: Sequence[AgentReport],
    devices: Sequence[DeviceReading],
    faults: Sequence[Fault],
    private_pid_namespace: bool | None,
    previous: Snapshot | None,
    elapsed_seconds: float,
) -> tuple[tuple[AgentReport, ...], tuple[Suspension, ...]]:
    """Return the reports and the suspensions. The pools of a process that is or may be suspended are unmapped.

    ``silent``: last reports of silent agents. An agent may block for a minute before the driver stops to list its
    process, while the memory is copied.
    """
    absent = _absent(devices, previous) if previous is not None else {}
    if previous is None or not absent:
        return tuple(reports), ()
    kept = {each.device_uuid for each in previous.suspensions}
    listing = {each.source for each in previous.devices if each.processes or each.uuid in kept}
    complete = complete_lists(devices, faults, private_pid_namespace, listing)
    before = {(each.device_uuid, each.process): each for each in previous.suspensions}
    reporting = {report.key for report in reports}
    suspensions: list[Suspension] = []
    checked: list[AgentReport] = []
    for report in (*reports, *(each for each in silent if each.key not in reporting)):
        own = []
        for device in absent.get(report.key, ()):
            last, known = previous.device(device.uuid), before.get((device.uuid, report.key))
            if device.missed or device.uuid not in complete:
                own += [known] if known is not None else []
                continue
            if is_confirmed(device.counts, report.key, complete=True):
                continue
            if known is None and last is not None:
                known = _begun(last, last.processes_by_key[report.key], elapsed_seconds)
            held = sum(pool.held_bytes for pool in report.pools if pool.device_uuid == device.uuid)
            after = known and _continued(known, device, held, report.age_seconds, elapsed_seconds)
            own += [after] if after else []
        suspensions += own
        if report.suspended or own:
            returned = {each.device_uuid for each in own if _has_returned(each, devices)}
            pools = unmapped(report.pools, {each.device_uuid for each in own} - returned)
            report = replace(report, pools=pools, suspended=any(each.confirmed for each in own))
        if own or report.key in reporting:
            checked.append(report)
    return tuple(checked), tuple(suspensions)


def _absent(devices: Sequence[DeviceReading], previous: Snapshot) -> Mapping[ProcessKey, Sequence[DeviceReading]]:
    """Return the processes that have left a device since the previous snapshot, and those of its suspensions."""
    found: dict[ProcessKey, list[DeviceReading]] = {}
    known = {each.device_uuid: set[ProcessKey]() for each in previous.suspensions}
    for each in previous.suspensions:
        known[each.device_uuid].add(each.process)
    for device in devices:
        last = previous.device(device.uuid)
        left = last.counts.keys() - device.counts.keys() if last is not None else set()
        for process in known.get(device.uuid, set()) | {who for who in left if last is not None and last.counts[who]}:
            found.setdefault(process, []).append(device)
    return found


def _begun(last: DeviceReading, listed: ProcessUsage, elapsed_seconds: float) -> Suspension | None:
    unattributed = _unattributed(last)
    return None if unattributed is None else Suspension(last.uuid, listed, unattributed, elapsed_seconds)


def _continued(
    known: Suspension, device: DeviceReading, held: int, age_seconds: float, elapsed_seconds: float
) -> Suspension | None:
    """Return the suspension after a reading without the process; None if it is none.

    The bytes of the process must be free, and the agent must have stated its pools since, or be silent.
    """
    if known.confirmed:
        return known if held else None
    absent, unattributed = elapsed_seconds - known.since, _unattributed(device)
    counted = known.usage.used_bytes or 0
    is_free = unattributed is not None and unattributed - known.unattributed_bytes < counted / 2
    if held and is_free and (age_seconds < absent or age_seconds >= SILENT_SECONDS):
        return replace(known, confirmed=True)
    decided = not held and age_seconds < absent
    return None if decided or absent > UNDECIDED_SECONDS else known


def _has_returned(known: Suspension, devices: Sequence[DeviceReading]) -> bool:
    """Return whether the bytes of a suspended process are used again: the driver lists it seconds after it has restored
    its memory.
    """
    if not known.confirmed:
        return False
    device = next(each for each in devices if each.uuid == known.device_uuid)
    unattributed = None if device.missed else _unattributed(device)
    return unattributed is not None and unattributed - known.unattributed_bytes >= (known.usage.used_bytes or 0) / 2


def _unattributed(device: DeviceReading) -> int | None:
    """Return the used bytes that the driver counts for no process."""
    if device.used_bytes is None:
        return None
    return device.used_bytes - sum(count for count in device.counts.values() if count is not None)


def unmapped(pools: Sequence[PoolUsage], uuids: Collection[str]) -> tuple[PoolUsage, ...]:
    """Return the pools, with all bytes of those on these devices as unmapped ones."""
    return tuple(
        replace(
            pool,
            live_bytes=0,
            held_bytes=0,
            reclaimable=Reclaimable(0, 0, 0, pool.reclaimable.exactness),
            stranded_bytes=0,
            unmapped_bytes=(pool.unmapped_bytes or 0) + pool.held_bytes,
            live_allocations=None,
        )
        if pool.device_uuid in uuids
        else pool
        for pool in pools
    )
