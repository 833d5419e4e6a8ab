"""Idle times of devices and of processes on them. No I/O.

A driver samples: work that is shorter than its sampling period may be missed, and the time starts with the first
reading. Where the utilisation is unknown, the idle time is unknown.
"""

from __future__ import annotations

from dataclasses import replace

from gpumond.facts.snapshot import DeviceReading, ProcessUsage


def with_idle_times(device: DeviceReading, before: DeviceReading | None, seconds: float) -> DeviceReading:
    """Return the device with its idle times, ``seconds`` after the reading ``before``."""
    processes = device.processes
    if processes and any(process.utilization_ratio is not None for process in processes):
        known = before.processes_by_key if before else {}
        processes = tuple(_process(process, known.get(process.key), seconds) for process in processes)
    idle = _longer(_use(device), before.idle_seconds if before else None, seconds)
    if idle is None and processes is device.processes:
        return device
    return replace(device, processes=processes, idle_seconds=idle)


def idle_seconds(device: DeviceReading, process: ProcessUsage) -> float | None:
    """Return a process's idle time; where the driver does not report it by process, that of the device."""
    if process.idle_seconds is not None:
        return max(process.idle_seconds, device.idle_seconds or 0.0)
    return device.idle_seconds or None


def _process(process: ProcessUsage, before: ProcessUsage | None, seconds: float) -> ProcessUsage:
    idle = _longer(process.utilization_ratio, before.idle_seconds if before else None, seconds)
    return process if idle == process.idle_seconds else replace(process, idle_seconds=idle)


def _use(device: DeviceReading) -> float | None:
    """Return the utilisation of the busiest engine; None where the driver does not report whether kernels run."""
    sensors = device.sensors
    if sensors.gpu_utilization_ratio is None:
        return None
    coders = (sensors.encoder_utilization_ratio or 0.0, sensors.decoder_utilization_ratio or 0.0)
    return max(sensors.gpu_utilization_ratio, *coders)


def _longer(use: float | None, before: float | None, seconds: float) -> float | None:
    if use is None:
        return None
    return 0.0 if use > 0 or before is None else before + seconds
