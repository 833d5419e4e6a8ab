"""Metric families of devices: memory, sensors, settings and hardware errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gpumond.facts.frame import Frame
from gpumond.facts.sensors import THROTTLE_REASONS
from gpumond.facts.snapshot import DeviceReading, XidErrors
from gpumond.metrics.families import Family, Row, families
from gpumond.quantities.table import DEVICE_IDLE, DEVICE_UP, MEMORY, SENSORS, Quantity

LABELS = ("uuid", "gpu")


def devices(frame: Frame) -> Iterator[tuple[tuple[str, ...], DeviceReading]]:
    for device in frame.snapshot.devices:
        yield (device.uuid, str(device.index)), device


def _info(frame: Frame) -> Iterator[Row]:
    source = frame.snapshot.source
    for device in frame.snapshot.devices:
        labels = (device.name, device.vendor, device.pci_bus_id, device.parent_uuid or "", source.driver_version or "")
        yield (device.uuid, str(device.index), *labels), 1


def _throttle(frame: Frame) -> Iterator[Row]:
    for labels, device in devices(frame):
        active = device.sensors.throttle_reasons
        for reason in THROTTLE_REASONS if active is not None else ():
            yield (*labels, reason), reason in (active or ())


def _compute_mode(frame: Frame) -> Iterator[Row]:
    for labels, device in devices(frame):
        if device.sensors.compute_mode is not None:
            yield (*labels, device.sensors.compute_mode), 1


def _of_xids(value: Callable[[XidErrors], float]) -> Callable[[Frame], Iterator[Row]]:
    def rows(frame: Frame) -> Iterator[Row]:
        index = frame.snapshot.gpu_labels
        for errors in frame.snapshot.xids:
            yield (errors.device_uuid, index.get(errors.device_uuid, ""), str(errors.xid)), value(errors)

    return rows


def _faults(frame: Frame) -> Iterator[Row]:
    index = frame.snapshot.gpu_labels
    for uuid, kind in {(fault.device_uuid, fault.kind) for fault in frame.snapshot.faults}:
        if uuid is not None:
            yield (uuid, index.get(uuid, ""), kind), 1


def _count(frame: Frame) -> Iterator[Row]:
    devices = frame.snapshot.devices
    yield ("up",), sum(device.up for device in devices)
    yield ("down",), sum(not device.up for device in devices)


XID_ERRORS = Family(
    "gpumond_device_xid_errors_total",
    "counter",
    "Xid errors reported by the driver since the daemon subscribed, including those of devices that are now lost.",
    ("uuid", "gpu", "xid"),
    _of_xids(lambda errors: errors.count),
)


THROTTLE = Family(
    "gpumond_device_throttle",
    "gauge",
    "1 while the clocks are reduced for this reason (NVML: clocks event reasons); gpu_idle is one of them.",
    (*LABELS, "reason"),
    _throttle,
)
COMPUTE_MODE = Family(
    "gpumond_device_compute_mode", "gauge", "1 for the current compute mode.", (*LABELS, "mode"), _compute_mode
)


def _sensors() -> Iterator[Family]:
    """Yield the families of the sensors that are numbers, and after related ones those that are names."""
    for each in families("gpumond_device_", LABELS, devices, SENSORS):
        yield each
        if each.name == "gpumond_device_performance_state":
            yield THROTTLE
        elif each.name == "gpumond_device_persistence_mode":
            yield COMPUTE_MODE


NO_RULE_VALUES: tuple[Quantity[DeviceReading], ...] = (
    Quantity(
        "memory_unified",
        "boolean",
        "1 if the device has no memory of its own and uses host memory; size and free then describe the host, "
        "and used is the sum over the processes.",
        lambda device: float(device.unified) if device.size_bytes is not None else None,
    ),
)
"""Quantities that rules do not compare."""

FAMILIES: tuple[Family, ...] = (
    Family(
        "gpumond_device_info",
        "gauge",
        "Device metadata; the value is always 1. MIG instances have a parent_uuid, and their memory is part of its.",
        ("uuid", "gpu", "name", "vendor", "pci_bus_id", "parent_uuid", "driver_version"),
        _info,
    ),
    *families("gpumond_device_", LABELS, devices, (DEVICE_IDLE, DEVICE_UP)),
    Family(
        "gpumond_device_fault",
        "gauge",
        "1 for each value of the device that cannot be read, and for the cause of a lost device.",
        ("uuid", "gpu", "kind"),
        _faults,
    ),
    *families("gpumond_device_", LABELS, devices, (*MEMORY, *NO_RULE_VALUES)),
    *_sensors(),
    XID_ERRORS,
    Family(
        "gpumond_device_xid_last_seen_timestamp_seconds",
        "gauge",
        "Unix time at which the driver last reported this Xid error.",
        ("uuid", "gpu", "xid"),
        _of_xids(lambda errors: errors.last_seen_at),
    ),
    Family(
        "gpumond_devices",
        "gauge",
        "Number of devices by state (up, down). A device that falls off the bus is still counted.",
        ("state",),
        _count,
    ),
)
