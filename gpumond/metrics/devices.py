"""Metric families of devices: memory, sensors, settings and hardware errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter

from gpumond.metrics.exposition import Family, Kind, Row
from gpumond.model.frame import Frame
from gpumond.model.sensors import THROTTLE_REASONS
from gpumond.model.snapshot import DeviceReading, XidErrors

COUNTED = "measured by the hardware over the last ten seconds (Hopper and later)"

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


def sensor(name: str, help: str, kind: Kind = "gauge", field: str = "") -> Family:
    """Return a family for the Sensors field called ``name``, or ``field`` if it is given."""
    return plain(name, attrgetter(f"sensors.{field or name}"), help, kind)


def by_label(name: str, label: str, fields: Mapping[str, str], help: str, kind: Kind = "gauge") -> Family:
    """Return one family for several fields of Sensors; ``fields`` maps label values to field names."""
    readers = {(value,): attrgetter(f"sensors.{field}") for value, field in fields.items()}
    return labelled(name, (label,), lambda d: {value: read(d) for value, read in readers.items()}, help, kind)


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


def _ecc(device: DeviceReading) -> Values:
    return {
        (kind, scope): getattr(device.sensors, f"ecc_{kind}_{scope}")
        for kind in ("corrected", "uncorrected")
        for scope in ("volatile", "aggregate")
    }


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
    sensor("bar1_size_bytes", "Size of the BAR1 window, through which the host accesses device memory."),
    sensor("bar1_used_bytes", "Mapped part of the BAR1 window."),
    sensor("gpu_utilization_ratio", "Fraction of the driver's last sampling period during which a kernel was running."),
    sensor(
        "memory_controller_utilization_ratio",
        "Fraction of the driver's last sampling period during which memory was read or written. Not memory usage.",
    ),
    sensor("encoder_utilization_ratio", "Fraction of the sampling period during which the video encoder was active."),
    sensor("decoder_utilization_ratio", "Fraction of the sampling period during which the video decoder was active."),
    sensor("graphics_engine_active_ratio", f"Fraction of time during which a kernel was running, {COUNTED}."),
    sensor("sm_active_ratio", f"Fraction of the multiprocessors that were active, {COUNTED}."),
    sensor("sm_occupancy_ratio", f"Resident warps as a fraction of the maximum on the multiprocessors, {COUNTED}."),
    sensor("tensor_active_ratio", f"Fraction of time during which the tensor cores were active, {COUNTED}."),
    sensor("dram_active_ratio", f"Fraction of the memory bandwidth in use, {COUNTED}."),
    sensor("nvlink_receive_bytes_per_second", f"Traffic received over all NVLinks, {COUNTED}."),
    sensor("nvlink_transmit_bytes_per_second", f"Traffic sent over all NVLinks, {COUNTED}."),
    sensor("sm_clock_hertz", "Clock frequency of the multiprocessors."),
    sensor("sm_clock_max_hertz", "Maximum clock frequency of the multiprocessors."),
    sensor("memory_clock_hertz", "Clock frequency of the memory."),
    sensor("memory_clock_max_hertz", "Maximum clock frequency of the memory."),
    sensor("performance_state", "Performance state, from 0 (fastest) to 15 (slowest)."),
    labelled(
        "throttle",
        ("reason",),
        _throttle,
        "1 while the clocks are reduced for this reason; gpu_idle is one of the reasons.",
    ),
    by_label(
        "temperature_celsius",
        "sensor",
        {"gpu": "gpu_temperature_celsius", "memory": "memory_temperature_celsius"},
        "Temperature by sensor.",
    ),
    by_label(
        "temperature_limit_celsius",
        "limit",
        {"slowdown": "slowdown_temperature_celsius", "shutdown": "shutdown_temperature_celsius"},
        "GPU temperature at which the hardware slows down or shuts down.",
    ),
    sensor("power_watts", "Power draw of the device."),
    sensor("power_limit_watts", "Enforced power limit."),
    sensor("energy_joules_total", "Energy consumed since the driver was loaded.", "counter", "energy_joules"),
    sensor("fan_speed_ratio", "Target fan speed as a fraction of the maximum; may exceed 1."),
    sensor("pcie_generation", "Current generation of the PCIe link."),
    sensor("pcie_generation_max", "Highest PCIe generation that the device and the slot support."),
    sensor("pcie_width", "Current number of PCIe lanes."),
    sensor("pcie_width_max", "Highest number of PCIe lanes that the device and the slot support."),
    sensor(
        "pcie_receive_bytes_per_second",
        "PCIe traffic from the host to the device, sampled for 20 ms every ten seconds.",
    ),
    sensor(
        "pcie_transmit_bytes_per_second",
        "PCIe traffic from the device to the host, sampled for 20 ms every ten seconds.",
    ),
    sensor("pcie_replays_total", "Packets retransmitted on the PCIe link.", "counter", "pcie_replays"),
    sensor("persistence_mode", "1 if the driver stays loaded while no process uses the device."),
    labelled("compute_mode", ("mode",), _compute_mode, "1 for the current compute mode."),
    labelled(
        "ecc_errors_total",
        ("kind", "scope"),
        _ecc,
        "ECC errors since the driver was loaded (volatile) and over the lifetime of the device (aggregate).",
        "counter",
    ),
    by_label(
        "retired_pages",
        "cause",
        {"single_bit": "retired_pages_single_bit", "double_bit": "retired_pages_double_bit"},
        "Retired memory pages (before Ampere).",
    ),
    sensor("retired_pages_pending", "1 if pages will be retired at the next reset."),
    by_label(
        "remapped_rows",
        "cause",
        {"correctable": "remapped_rows_correctable", "uncorrectable": "remapped_rows_uncorrectable"},
        "Memory rows remapped to spare rows (Ampere and later).",
    ),
    sensor("remapped_rows_pending", "1 if rows will be remapped at the next reset."),
    sensor("remapped_rows_failed", "1 if remapping a row has failed; the device should be replaced."),
    by_label(
        "nvlink_errors_total",
        "kind",
        {kind: f"nvlink_{kind}_errors" for kind in ("crc_flit", "crc_data", "replay", "recovery")},
        "Errors on all NVLinks of the device by kind.",
        "counter",
    ),
    sensor(
        "file_cache_bytes",
        "Page cache of the host's kernel in device memory that is a NUMA node (Grace Hopper). It is unclaimed, and "
        "the kernel frees it when memory is low.",
    ),
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
