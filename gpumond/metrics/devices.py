"""Metric families of devices: memory, sensors, settings and hardware errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import groupby
from operator import attrgetter

from gpumond.facts.frame import Frame
from gpumond.facts.sensors import THROTTLE_REASONS
from gpumond.facts.snapshot import DeviceReading, XidErrors
from gpumond.metrics.families import Family, Kind, Row
from gpumond.quantities.table import SENSORS

HELP = {
    "temperature_celsius": "Temperature by sensor.",
    "temperature_limit_celsius": "GPU temperature at which the hardware slows down or shuts down.",
    "ecc_errors_total": "ECC errors since the driver was loaded (volatile) and over the lifetime of the device "
    "(aggregate).",
    "retired_pages": "Retired memory pages (before Ampere).",
    "remapped_rows": "Memory rows remapped to spare rows (Ampere and later).",
    "nvlink_errors_total": "Errors on all NVLinks of the device by kind.",
}
"""Help texts of the families with several quantities; others have the text of their quantity."""

Values = Mapping[tuple[str, ...], float | None]
"""Values by the label values other than uuid and gpu."""


def labelled(
    name: str, labels: tuple[str, ...], values: Callable[[DeviceReading], Values], help: str, kind: Kind = "gauge"
) -> Family:
    def rows(frame: Frame) -> Iterator[Row]:
        for device in frame.snapshot.devices:
            for own, value in values(device).items():
                yield (device.uuid, str(device.index), *own), value

    return Family(f"gpumond_device_{name}", kind, help, ("uuid", "gpu", *labels), rows)


def plain(name: str, value: Callable[[DeviceReading], float | None], help: str, kind: Kind = "gauge") -> Family:
    def rows(frame: Frame) -> Iterable[Row]:
        return [((device.uuid, str(device.index)), value(device)) for device in frame.snapshot.devices]

    return Family(f"gpumond_device_{name}", kind, help, ("uuid", "gpu"), rows)


def _info(frame: Frame) -> Iterator[Row]:
    source = frame.snapshot.source
    for device in frame.snapshot.devices:
        labels = (device.name, device.vendor, device.pci_bus_id, device.parent_uuid or "", source.driver_version or "")
        yield (device.uuid, str(device.index), *labels), 1


def _throttle(device: DeviceReading) -> Values:
    reasons = device.sensors.throttle_reasons
    return {} if reasons is None else {(reason,): reason in reasons for reason in THROTTLE_REASONS}


def _compute_mode(device: DeviceReading) -> Values:
    mode = device.sensors.compute_mode
    return {} if mode is None else {(mode,): 1}


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
    "XID errors reported by the driver since the daemon subscribed, including those of devices that are now lost.",
    ("uuid", "gpu", "xid"),
    _of_xids(lambda errors: errors.count),
)


def _sensor_families() -> Iterator[Family]:
    """Yield the families of `SENSORS` in its order."""
    for name, group in groupby(SENSORS, lambda quantity: quantity.metric):
        quantities = list(group)
        kind: Kind = "counter" if name.endswith("_total") else "gauge"
        labels = tuple(quantities[0].labels)
        readers = {tuple(each.labels.values()): attrgetter(f"sensors.{each.name}") for each in quantities}
        if labels:
            yield labelled(name, labels, partial(_read_all, readers), HELP[name], kind)
        elif name:
            yield plain(name, readers[()], quantities[0].text, kind)
        if name == "performance_state":
            yield labelled(
                "throttle",
                ("reason",),
                _throttle,
                "1 while the clocks are reduced for this reason; gpu_idle is one of the reasons.",
            )
        elif name == "persistence_mode":
            yield labelled("compute_mode", ("mode",), _compute_mode, "1 for the current compute mode.")


def _read_all(
    readers: Mapping[tuple[str, ...], Callable[[DeviceReading], float | None]], device: DeviceReading
) -> Values:
    return {labels: read(device) for labels, read in readers.items()}


FAMILIES: tuple[Family, ...] = (
    Family(
        "gpumond_device_info",
        "gauge",
        "Labels that describe a device. parent_uuid is set on MIG instances, whose memory is part of their parent's.",
        ("uuid", "gpu", "name", "vendor", "pci_bus_id", "parent_uuid", "driver_version"),
        _info,
    ),
    plain(
        "idle_seconds",
        lambda d: d.idle_seconds,
        "Time without activity on the device, according to the driver's samples since the daemon started.",
    ),
    plain("up", lambda d: float(d.up), "1 while the device responds to its driver, else 0."),
    Family(
        "gpumond_device_fault",
        "gauge",
        "1 for each value of the device that cannot be read, and for the cause of a lost device.",
        ("uuid", "gpu", "kind"),
        _faults,
    ),
    plain("memory_size_bytes", lambda d: d.size_bytes, "Total memory of the device."),
    plain(
        "memory_used_bytes",
        lambda d: d.used_bytes,
        "Memory in use as reported by the driver, excluding its own reservation if that is known.",
    ),
    plain("memory_free_bytes", lambda d: d.free_bytes, "Free memory as reported by the driver."),
    plain("memory_reserved_bytes", lambda d: d.reserved_bytes, "Memory reserved by the driver."),
    plain(
        "memory_unified",
        lambda d: float(d.unified) if d.size_bytes is not None else None,
        "1 if the device has no memory of its own and uses host memory; size and free then describe the host, "
        "and used is the sum over the processes.",
    ),
    *_sensor_families(),
    XID_ERRORS,
    Family(
        "gpumond_device_xid_last_seen_timestamp_seconds",
        "gauge",
        "Unix time at which the driver last reported this XID error.",
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
