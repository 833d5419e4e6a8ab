"""The facts of one tick: a Snapshot from readings and reports. No I/O; time is an argument.

A suspended process (cuCheckpointProcess*, cuda-checkpoint) is recognized by what the driver stops counting. The driver
no longer lists it, and the bytes that it counted for it are free. The process continues to exist, its agent stays
connected and still states its pools, or is silent because its calls to the driver block. A process that has closed its
CUDA context differs: its agent reports that its pools are empty. Without an agent the two cannot be told apart.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from gpumond.facts.pools import PoolUsage, Reclaimable
from gpumond.facts.program import ProcessKey
from gpumond.facts.snapshot import (
    MAX_MISSED_READINGS,
    STARTING,
    AgentReport,
    DeviceReading,
    Fault,
    ProcessEnd,
    ProcessUsage,
    Reading,
    Snapshot,
    SourceState,
    Suspension,
)
from gpumond.tick.claims import check_claims, fully_listed_devices, may_hold_memory
from gpumond.tick.ledger import overheads_of_processes

SILENT_AGENT_SECONDS = 3.0
"""Age from which a report is that of a silent agent: it would have reported twice since."""
MAX_UNDECIDED_SECONDS = 6.0
"""Maximum time without evidence. After it, a process that the driver does not list is a process without memory."""


def detect_suspensions(
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
    absent = _absent_processes(devices, previous) if previous is not None else {}
    if previous is None or not absent:
        return tuple(reports), ()
    suspended_uuids = {each.device_uuid for each in previous.suspensions}
    listing_sources = {each.source for each in previous.devices if each.processes or each.uuid in suspended_uuids}
    fully_listed = fully_listed_devices(devices, faults, private_pid_namespace, listing_sources)
    before = {(each.device_uuid, each.process): each for each in previous.suspensions}
    reporting = {report.key for report in reports}
    suspensions: list[Suspension] = []
    checked: list[AgentReport] = []
    for report in (*reports, *(each for each in silent if each.key not in reporting)):
        own_suspensions = []
        for device in absent.get(report.key, ()):
            previous_device, suspension = previous.device(device.uuid), before.get((device.uuid, report.key))
            if device.missed_readings or device.uuid not in fully_listed:
                own_suspensions += [suspension] if suspension is not None else []
                continue
            if may_hold_memory(device.used_by_process, report.key, is_fully_listed=True):
                continue
            if suspension is None and previous_device is not None:
                suspension = _new_suspension(
                    previous_device, previous_device.processes_by_key[report.key], elapsed_seconds
                )
            held = sum(pool.held_bytes for pool in report.pools if pool.device_uuid == device.uuid)
            after = suspension and _next_suspension(suspension, device, held, report.age_seconds, elapsed_seconds)
            own_suspensions += [after] if after else []
        suspensions += own_suspensions
        if report.suspended or own_suspensions:
            returned = {each.device_uuid for each in own_suspensions if _has_returned(each, devices)}
            pools = as_unmapped(report.pools, {each.device_uuid for each in own_suspensions} - returned)
            report = replace(report, pools=pools, suspended=any(each.confirmed for each in own_suspensions))
        if own_suspensions or report.key in reporting:
            checked.append(report)
    return tuple(checked), tuple(suspensions)


def _absent_processes(
    devices: Sequence[DeviceReading], previous: Snapshot
) -> Mapping[ProcessKey, Sequence[DeviceReading]]:
    """Return the processes that have left a device since the previous snapshot, and those of its suspensions."""
    devices_by_process: dict[ProcessKey, list[DeviceReading]] = {}
    for device in devices:
        suspended = {each.process for each in previous.suspensions if each.device_uuid == device.uuid}
        before = previous.device(device.uuid)
        used_before = before.used_by_process if before is not None else {}
        departed = {process for process, used in used_before.items() if used and process not in device.used_by_process}
        for process in suspended | departed:
            devices_by_process.setdefault(process, []).append(device)
    return devices_by_process


def _new_suspension(device: DeviceReading, usage: ProcessUsage, elapsed_seconds: float) -> Suspension | None:
    unattributed = _unattributed_bytes(device)
    return None if unattributed is None else Suspension(device.uuid, usage, unattributed, elapsed_seconds)


def _next_suspension(
    suspension: Suspension, device: DeviceReading, held_bytes: int, age_seconds: float, elapsed_seconds: float
) -> Suspension | None:
    """Return the suspension after a reading without the process; None if it is none.

    The bytes of the process must be free, and the agent must have stated its pools since, or be silent.
    """
    if suspension.confirmed:
        return suspension if held_bytes else None
    absent_seconds, unattributed = elapsed_seconds - suspension.since, _unattributed_bytes(device)
    counted_bytes = suspension.usage.used_bytes or 0
    is_free = unattributed is not None and unattributed - suspension.unattributed_bytes < counted_bytes / 2
    if held_bytes and is_free and (age_seconds < absent_seconds or age_seconds >= SILENT_AGENT_SECONDS):
        return replace(suspension, confirmed=True)
    decided = not held_bytes and age_seconds < absent_seconds
    return None if decided or absent_seconds > MAX_UNDECIDED_SECONDS else suspension


def _has_returned(suspension: Suspension, devices: Sequence[DeviceReading]) -> bool:
    """Return whether a suspended process uses its bytes again: the driver lists it only seconds later."""
    if not suspension.confirmed:
        return False
    device = next(each for each in devices if each.uuid == suspension.device_uuid)
    unattributed = None if device.missed_readings else _unattributed_bytes(device)
    return (
        unattributed is not None
        and unattributed - suspension.unattributed_bytes >= (suspension.usage.used_bytes or 0) / 2
    )


def _unattributed_bytes(device: DeviceReading) -> int | None:
    """Return the used bytes that the driver attributes to no process."""
    if device.used_bytes is None:
        return None
    return device.used_bytes - sum(count for count in device.used_by_process.values() if count is not None)


def as_unmapped(pools: Sequence[PoolUsage], uuids: Collection[str]) -> tuple[PoolUsage, ...]:
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


def observe(
    previous: Snapshot | None,
    source: SourceState,
    reading: Reading | None,
    reports: Sequence[AgentReport],
    taken_at: float,
    elapsed_seconds: float,
    store_writable: bool | None = None,
    faults: Sequence[Fault] = (),
    private_pid_namespace: bool | None = None,
    ends: Sequence[ProcessEnd] = (),
    silent: Sequence[AgentReport] = (),
    uptime_seconds: float | None = None,
    person_uid: Callable[[int], int] = int,
) -> Snapshot:
    """Make the facts of one tick. ``reading`` is None if none arrived in time.

    ``silent``: the last reports of silent agents, of which only those of suspended processes are used. ``person_uid``:
    the person who owns a uid.

    A device that did not answer keeps the values of its last reading for two ticks. After that all its values are
    unknown until it answers again or the source no longer lists it.
    """
    all_faults = [*(reading.faults if reading else ()), *faults]
    previous_devices = previous.devices if previous else ()
    interval_seconds = elapsed_seconds - previous.elapsed_seconds if previous else 0.0
    devices = list(_devices(previous_devices, reading, interval_seconds))
    fully_listed = fully_listed_devices(devices, all_faults, private_pid_namespace)
    reports, suspensions = detect_suspensions(
        reports, silent, devices, all_faults, private_pid_namespace, previous, elapsed_seconds
    )
    reports, excesses = check_claims(reports, devices, fully_listed, previous, all_faults, person_uid, interval_seconds)
    if not source.up and source.reason and source.reason != STARTING:
        all_faults.append(Fault(source.name, source.reason, None, source.detail))
    xids = reading.xids if reading else previous.xids if previous else ()
    return Snapshot(
        seq=previous.seq + 1 if previous else 1,
        taken_at=taken_at,
        elapsed_seconds=elapsed_seconds,
        source=source,
        devices=tuple(devices),
        reports=reports,
        faults=tuple(all_faults),
        xids=xids,
        store_writable=store_writable,
        private_pid_namespace=private_pid_namespace,
        ends=tuple(ends),
        excesses=excesses,
        uptime_seconds=uptime_seconds,
        suspensions=suspensions,
        overheads=tuple(overheads_of_processes(devices, reports, suspensions, previous, elapsed_seconds)),
    )


def _devices(previous: Sequence[DeviceReading], reading: Reading | None, seconds: float) -> Iterator[DeviceReading]:
    fresh = {device.uuid: device for device in reading.devices} if reading else {}
    for device in previous:
        if device.uuid in fresh:
            yield with_idle_times(fresh.pop(device.uuid), device, seconds)
        elif reading is None or _has_fault(device, reading.faults):
            missed, up = device.missed_readings + 1, device.up and reading is None
            yield (
                replace(device, missed_readings=missed, up=up)
                if missed < MAX_MISSED_READINGS
                else _without_values(device, missed)
            )
    yield from (with_idle_times(device, None, seconds) for device in fresh.values())


def _has_fault(device: DeviceReading, faults: Iterable[Fault]) -> bool:
    """Return True if a fault explains that the device is missing. A fault without a device affects its whole source."""
    return any(
        fault.device_uuid in (device.uuid, device.parent_uuid)
        if fault.device_uuid is not None
        else fault.source == device.source or not device.source
        for fault in faults
    )


def _without_values(device: DeviceReading, missed: int) -> DeviceReading:
    return DeviceReading(
        uuid=device.uuid,
        index=device.index,
        name=device.name,
        vendor=device.vendor,
        pci_bus_id=device.pci_bus_id,
        parent_uuid=device.parent_uuid,
        unified=device.unified,
        missed_readings=missed,
        up=False,
        source=device.source,
    )


def with_idle_times(device: DeviceReading, before: DeviceReading | None, seconds: float) -> DeviceReading:
    """Return the device with its idle times, ``seconds`` after the reading ``before``.

    A driver samples: work that is shorter than its sampling period may be missed, and the time starts with the first
    reading. Where the utilization is unknown, the idle time is unknown; but an idle device's processes are idle.
    """
    utilization = _utilization(device)
    processes_before = before.processes_by_key if before and device.processes else {}
    processes = device.processes and tuple(
        _with_idle_time(process, utilization, processes_before.get(process.key), seconds)
        for process in device.processes
    )
    idle = _next_idle_seconds(utilization, before.idle_seconds if before else None, seconds)
    if idle is None and processes == device.processes:
        return device
    return replace(device, processes=processes, idle_seconds=idle)


def _with_idle_time(
    process: ProcessUsage, device_utilization: float | None, before: ProcessUsage | None, seconds: float
) -> ProcessUsage:
    utilization = process.utilization_ratio
    if utilization is None and device_utilization == 0.0:
        utilization = device_utilization
    idle = _next_idle_seconds(utilization, before.idle_seconds if before else None, seconds)
    return process if idle == process.idle_seconds else replace(process, idle_seconds=idle)


def _utilization(device: DeviceReading) -> float | None:
    """Return the utilization of the busiest engine; None where the driver does not report whether kernels run."""
    sensors = device.sensors
    if sensors.gpu_utilization_ratio is None:
        return None
    coders = (sensors.encoder_utilization_ratio or 0.0, sensors.decoder_utilization_ratio or 0.0)
    return max(sensors.gpu_utilization_ratio, *coders)


def _next_idle_seconds(utilization: float | None, before: float | None, seconds: float) -> float | None:
    if utilization is None:
        return None
    return 0.0 if utilization > 0 or before is None else before + seconds
