"""The families of devices: memory, sensors, settings, errors of the hardware."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter

from gpumond.metrics.family import Family, Kind, Row
from gpumond.model.frame import Frame
from gpumond.model.sensors import THROTTLE_REASONS
from gpumond.model.snapshot import DeviceReading, XidErrors

COUNTED = "counted by the hardware over the last ten seconds (Hopper and later)"

Values = Mapping[tuple[str, ...], float | None]
"""By the values of the labels besides uuid and gpu."""


def labelled(
    name: str, labels: tuple[str, ...], values: Callable[[DeviceReading], Values], help: str, kind: Kind = "gauge"
) -> Family:
    def rows(frame: Frame) -> Iterator[Row]:
        for device in frame.snapshot.devices:
            for own, value in values(device).items():
                yield (device.uuid, str(device.index), *own), value

    return Family(f"gpumond_device_{name}", kind, help, ("uuid", "gpu", *labels), rows)


def plain(name: str, value: Callable[[DeviceReading], float | None], help: str, kind: Kind = "gauge") -> Family:
    return labelled(name, (), lambda device: {(): value(device)}, help, kind)


def sensor(name: str, help: str, kind: Kind = "gauge", field: str = "") -> Family:
    """The field of Sensors of that name, unless another one is given."""
    return plain(name, attrgetter(f"sensors.{field or name}"), help, kind)


def by_label(name: str, label: str, fields: Mapping[str, str], help: str, kind: Kind = "gauge") -> Family:
    """Several fields of Sensors as one family; ``fields`` are by the label's value."""
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
        index = {device.uuid: str(device.index) for device in frame.snapshot.devices}
        for errors in frame.snapshot.xids:
            yield (errors.device_uuid, index.get(errors.device_uuid, ""), str(errors.xid)), value(errors)

    return rows


def _faults(frame: Frame) -> Iterator[Row]:
    index = {device.uuid: str(device.index) for device in frame.snapshot.devices}
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
    "XID errors that the driver reported since the daemon began to listen; also of a device that is lost since.",
    ("uuid", "gpu", "xid"),
    _of_xids(lambda errors: errors.count),
)

FAMILIES: tuple[Family, ...] = (
    Family(
        "gpumond_device_info",
        "gauge",
        "Descriptive labels of a device; parent_uuid is set on MIG instances, whose bytes their parent counts too.",
        ("uuid", "gpu", "name", "vendor", "pci_bus_id", "parent_uuid", "driver_version"),
        _info,
    ),
    plain(
        "idle_seconds",
        lambda d: d.idle_seconds,
        "For how long nothing ran on the device, as far as the driver samples it and the daemon has watched.",
    ),
    plain("up", lambda d: float(d.up), "1 while the device answers its driver, else 0."),
    Family(
        "gpumond_device_fault",
        "gauge",
        "1 for each thing of a device that cannot be read now, and for the reason why a lost device is lost.",
        ("uuid", "gpu", "kind"),
        _faults,
    ),
    plain("memory_size_bytes", lambda d: d.size_bytes, "Memory of the device."),
    plain(
        "memory_used_bytes",
        lambda d: d.used_bytes,
        "Memory in use according to the driver, its own reservation excluded where it can tell.",
    ),
    plain("memory_free_bytes", lambda d: d.free_bytes, "Memory free according to the driver."),
    plain("memory_reserved_bytes", lambda d: d.reserved_bytes, "Memory that the driver keeps for itself."),
    plain(
        "memory_unified",
        lambda d: float(d.unified) if d.size_bytes is not None else None,
        "1 if the device has no memory of its own and uses the host's: size and free are then the machine's, "
        "and used is the sum of the processes.",
    ),
    sensor("bar1_size_bytes", "Window through which the host can address the device's memory."),
    sensor("bar1_used_bytes", "Part of that window that is mapped."),
    sensor("gpu_utilization_ratio", "Share of the driver's last sampling period in which a kernel ran."),
    sensor(
        "memory_controller_utilization_ratio",
        "Share of the driver's last sampling period in which memory was read or written; not how full it is.",
    ),
    sensor("encoder_utilization_ratio", "Share of the sampling period in which the video encoder ran."),
    sensor("decoder_utilization_ratio", "Share of the sampling period in which the video decoder ran."),
    sensor("graphics_engine_active_ratio", f"Share of the time in which any kernel ran, {COUNTED}."),
    sensor("sm_active_ratio", f"Share of the multiprocessors that had work, {COUNTED}."),
    sensor("sm_occupancy_ratio", f"Share of the warps that fit on the multiprocessors which they had, {COUNTED}."),
    sensor("tensor_active_ratio", f"Share of the time in which the tensor cores worked, {COUNTED}."),
    sensor("dram_active_ratio", f"Share of the memory's bandwidth that was used, {COUNTED}."),
    sensor("nvlink_receive_bytes_per_second", f"Traffic to the device on all NVLinks, {COUNTED}."),
    sensor("nvlink_transmit_bytes_per_second", f"Traffic from the device on all NVLinks, {COUNTED}."),
    sensor("sm_clock_hertz", "Clock of the multiprocessors."),
    sensor("sm_clock_max_hertz", "The highest clock of the multiprocessors."),
    sensor("memory_clock_hertz", "Clock of the memory."),
    sensor("memory_clock_max_hertz", "The highest clock of the memory."),
    sensor("performance_state", "0 is the fastest, 15 the slowest."),
    labelled(
        "throttle", ("reason",), _throttle, "1 while the clocks are held down for that reason; gpu_idle is one of them."
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
        "Temperature of the GPU at which the hardware slows down, and shuts down.",
    ),
    sensor("power_watts", "Power drawn by the device."),
    sensor("power_limit_watts", "Power limit that is enforced."),
    sensor("energy_joules_total", "Energy used since the driver was loaded.", "counter", "energy_joules"),
    sensor("fan_speed_ratio", "Intended speed of the fan; of its maximum, may exceed 1."),
    sensor("pcie_generation", "Generation of the PCIe link as it is now."),
    sensor("pcie_generation_max", "The highest generation that device and slot allow."),
    sensor("pcie_width", "Lanes of the PCIe link as it is now."),
    sensor("pcie_width_max", "The most lanes that device and slot allow."),
    sensor("pcie_receive_bytes_per_second", "Traffic from the host to the device, over 20 ms every ten seconds."),
    sensor("pcie_transmit_bytes_per_second", "Traffic from the device to the host, over 20 ms every ten seconds."),
    sensor("pcie_replays_total", "Packets sent again on the PCIe link.", "counter", "pcie_replays"),
    sensor("persistence_mode", "1 if the driver stays loaded while nothing uses the device."),
    labelled("compute_mode", ("mode",), _compute_mode, "1 for the compute mode that is set."),
    labelled(
        "ecc_errors_total",
        ("kind", "scope"),
        _ecc,
        "ECC errors, since the driver was loaded (volatile) and in the life of the device (aggregate).",
        "counter",
    ),
    by_label(
        "retired_pages",
        "cause",
        {"single_bit": "retired_pages_single_bit", "double_bit": "retired_pages_double_bit"},
        "Pages of memory taken out of use (before Ampere).",
    ),
    sensor("retired_pages_pending", "1 if pages are taken out of use at the next reset."),
    by_label(
        "remapped_rows",
        "cause",
        {"correctable": "remapped_rows_correctable", "uncorrectable": "remapped_rows_uncorrectable"},
        "Rows of memory replaced by spare ones (Ampere and later).",
    ),
    sensor("remapped_rows_pending", "1 if rows are replaced at the next reset."),
    sensor("remapped_rows_failed", "1 if a row could not be replaced: the device should be."),
    by_label(
        "nvlink_errors_total",
        "kind",
        {kind: f"nvlink_{kind}_errors" for kind in ("crc_flit", "crc_data", "replay", "recovery")},
        "Errors on all NVLinks of the device.",
        "counter",
    ),
    sensor(
        "file_cache_bytes",
        "What the host's kernel keeps of files in the device's memory, which it has as a NUMA node (Grace Hopper); "
        "unclaimed, and given up when memory is short.",
    ),
    XID_ERRORS,
    Family(
        "gpumond_device_xid_last_seen_timestamp_seconds",
        "gauge",
        "When the driver last reported that XID error.",
        ("uuid", "gpu", "xid"),
        _of_xids(lambda errors: errors.last_seen_at),
    ),
    Family(
        "gpumond_devices",
        "gauge",
        "Devices by whether they answer; a device that falls off the bus stays counted.",
        ("state",),
        _count,
    ),
)
