"""The facts of one tick: a Snapshot from readings and reports. No I/O; time is an argument."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from gpumond.facts.snapshot import (
    MISSED_LIMIT,
    STARTING,
    AgentReport,
    DeviceReading,
    Fault,
    ProcessUsage,
    ProgramEnd,
    Reading,
    Snapshot,
    SourceState,
)
from gpumond.tick.claims import check_claims, complete_lists
from gpumond.tick.ledger import following
from gpumond.tick.suspensions import suspending


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
    ends: Sequence[ProgramEnd] = (),
    silent: Sequence[AgentReport] = (),
    uptime_seconds: float | None = None,
    person_of: Callable[[int], int] = int,
) -> Snapshot:
    """Make the facts of one tick. ``reading`` is None if none arrived in time.

    ``silent``: the last reports of silent agents, of which only those of suspended processes are used. ``person_of``:
    the person who owns a uid.

    A device that did not answer keeps the values of its last reading for two ticks. After that all its values are
    unknown until it answers again or the source no longer lists it.
    """
    all_faults = [*(reading.faults if reading else ()), *faults]
    known = previous.devices if previous else ()
    seconds = elapsed_seconds - previous.elapsed_seconds if previous else 0.0
    devices: list[DeviceReading] = []
    for device in _devices(known, reading, seconds):
        devices.append(device)
    complete = complete_lists(devices, all_faults, private_pid_namespace)
    reports, suspensions = suspending(
        reports, silent, devices, all_faults, private_pid_namespace, previous, elapsed_seconds
    )
    reports, excesses = check_claims(reports, devices, complete, previous, all_faults, person_of)
    if not source.up and source.reason and source.reason != STARTING:
        all_faults.append(Fault(source.name, source.reason, None, source.detail))
    seq = previous.seq + 1 if previous else 1
    xids = reading.xids if reading else previous.xids if previous else ()
    return Snapshot(
        seq=seq,
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
        overheads=(tuple(following(devices, reports, suspensions, previous, elapsed_seconds))),
    )


def _devices(known: Sequence[DeviceReading], reading: Reading | None, seconds: float) -> Iterator[DeviceReading]:
    fresh = {device.uuid: device for device in reading.devices} if reading else {}
    for device in known:
        if device.uuid in fresh:
            yield with_idle_times(fresh.pop(device.uuid), device, seconds)
        elif reading is None or _at_fault(device, reading.faults):
            missed, up = device.missed + 1, device.up and reading is None
            yield replace(device, missed=missed, up=up) if missed < MISSED_LIMIT else _unknown(device, missed)
    yield from (with_idle_times(device, None, seconds) for device in fresh.values())


def _at_fault(device: DeviceReading, faults: Iterable[Fault]) -> bool:
    """Return True if a fault explains that the device is missing. A fault without a device affects its whole source."""
    return any(
        fault.device_uuid in (device.uuid, device.parent_uuid)
        if fault.device_uuid is not None
        else fault.source == device.source or not device.source
        for fault in faults
    )


def _unknown(device: DeviceReading, missed: int) -> DeviceReading:
    return DeviceReading(
        uuid=device.uuid,
        index=device.index,
        name=device.name,
        vendor=device.vendor,
        pci_bus_id=device.pci_bus_id,
        parent_uuid=device.parent_uuid,
        unified=device.unified,
        missed=missed,
        up=False,
        source=device.source,
    )


def with_idle_times(device: DeviceReading, before: DeviceReading | None, seconds: float) -> DeviceReading:
    """Return the device with its idle times, ``seconds`` after the reading ``before``.

    A driver samples: work that is shorter than its sampling period may be missed, and the time starts with the first
    reading. Where the utilization is unknown, the idle time is unknown.
    """
    processes = device.processes
    if processes and any(process.utilization_ratio is not None for process in processes):
        known = before.processes_by_key if before else {}
        processes = tuple(_process(process, known.get(process.key), seconds) for process in processes)
    idle = _longer(_use(device), before.idle_seconds if before else None, seconds)
    if idle is None and processes is device.processes:
        return device
    return replace(device, processes=processes, idle_seconds=idle)


def _process(process: ProcessUsage, before: ProcessUsage | None, seconds: float) -> ProcessUsage:
    idle = _longer(process.utilization_ratio, before.idle_seconds if before else None, seconds)
    return process if idle == process.idle_seconds else replace(process, idle_seconds=idle)


def _use(device: DeviceReading) -> float | None:
    """Return the utilization of the busiest engine; None where the driver does not report whether kernels run."""
    sensors = device.sensors
    if sensors.gpu_utilization_ratio is None:
        return None
    coders = (sensors.encoder_utilization_ratio or 0.0, sensors.decoder_utilization_ratio or 0.0)
    return max(sensors.gpu_utilization_ratio, *coders)


def _longer(use: float | None, before: float | None, seconds: float) -> float | None:
    if use is None:
        return None
    return 0.0 if use > 0 or before is None else before + seconds
