"""Quantities of devices, their driver and the daemon.

One table, from which `/metrics`, the values of rules and both reference pages derive. Each is read from one fact.
Values of rules that need more than that are in the scopes (`device_scope`), and families without a value of rules in
`metrics`. No I/O.
"""

from __future__ import annotations

from typing import Any

from gpumond.facts.snapshot import NO_DEVICE, RELEASED, STARTING, DeviceReading, Snapshot
from gpumond.quantities.quantity import Quantity, attribute_quantity, float_or_none

DEVICE_UP = Quantity[DeviceReading](
    "up", "1 while the device responds to its driver, else 0.", lambda device: float(device.up), is_boolean=True
)
DEVICE_IDLE: Quantity[DeviceReading] = attribute_quantity(
    "idle_seconds", "Time without activity on the device, according to the driver's samples since the daemon started."
)
MEMORY_QUANTITIES: tuple[Quantity[DeviceReading], ...] = (
    attribute_quantity("size_bytes", "Total memory of the device.", "memory_size_bytes"),
    attribute_quantity(
        "used_bytes",
        "Used memory as reported by the driver, without reserved memory if that is known.",
        "memory_used_bytes",
    ),
    attribute_quantity("free_bytes", "Free memory as reported by the driver.", "memory_free_bytes"),
    attribute_quantity("reserved_bytes", "Memory reserved by the driver.", "memory_reserved_bytes"),
)


def _sensor(name: str, text: str, family: str | None = None, **options: Any) -> Quantity[DeviceReading]:
    """Return the quantity of the field of `Sensors` with this name."""
    return attribute_quantity(name, text, family, field=f"sensors.{name}", **options)


def _counter(name: str, text: str, family: str, **labels: str) -> Quantity[DeviceReading]:
    return _sensor(name, text, family, labels=labels, is_counter=True)


def _temperature(name: str, text: str, family: str, **labels: str) -> Quantity[DeviceReading]:
    return _sensor(f"{name}_temperature_celsius", text, family, labels=labels)


GPM_NOTE = "measured by the hardware over the last ten seconds (Hopper and later)"

SENSOR_QUANTITIES: tuple[Quantity[DeviceReading], ...] = (
    _sensor("bar1_size_bytes", "Size of the BAR1 window, through which the host accesses device memory."),
    _sensor("bar1_used_bytes", "Mapped part of the BAR1 window."),
    _sensor(
        "gpu_utilization_ratio", "Fraction of the driver's last sampling period during which a kernel was running."
    ),
    _sensor(
        "memory_controller_utilization_ratio",
        "Fraction of the driver's last sampling period during which memory was read or written. Not memory usage.",
    ),
    _sensor("encoder_utilization_ratio", "Fraction of the sampling period during which the video encoder was active."),
    _sensor("decoder_utilization_ratio", "Fraction of the sampling period during which the video decoder was active."),
    _sensor("graphics_engine_active_ratio", f"Fraction of time during which a kernel was running, {GPM_NOTE}."),
    _sensor("sm_active_ratio", f"Fraction of the SMs that were active, {GPM_NOTE}."),
    _sensor("sm_occupancy_ratio", f"Resident warps as a fraction of the SMs' maximum, {GPM_NOTE}."),
    _sensor("tensor_active_ratio", f"Fraction of time during which the tensor cores were active, {GPM_NOTE}."),
    _sensor("dram_active_ratio", f"Fraction of the memory bandwidth in use, {GPM_NOTE}."),
    _sensor("nvlink_receive_bytes_per_second", f"Traffic received over all NVLinks, {GPM_NOTE}."),
    _sensor("nvlink_transmit_bytes_per_second", f"Traffic sent over all NVLinks, {GPM_NOTE}."),
    _sensor("sm_clock_hertz", "SM clock frequency."),
    _sensor("sm_clock_max_hertz", "Maximum SM clock frequency."),
    _sensor("memory_clock_hertz", "Clock frequency of the memory."),
    _sensor("memory_clock_max_hertz", "Maximum clock frequency of the memory."),
    _sensor("performance_state", "Performance state, from 0 (fastest) to 15 (slowest)."),
    _temperature("gpu", "Temperature of the GPU.", "temperature_celsius", sensor="gpu"),
    _temperature("memory", "Temperature of the memory.", "temperature_celsius", sensor="memory"),
    _temperature(
        "slowdown", "GPU temperature at which the hardware slows down.", "temperature_limit_celsius", limit="slowdown"
    ),
    _temperature(
        "shutdown", "GPU temperature at which the hardware shuts down.", "temperature_limit_celsius", limit="shutdown"
    ),
    _sensor("power_watts", "Power draw of the device."),
    _sensor("power_limit_watts", "Enforced power limit."),
    _sensor("energy_joules", "Energy consumed since the driver was loaded.", "energy_joules_total", is_counter=True),
    _sensor("fan_speed_ratio", "Target fan speed as a fraction of the maximum; may exceed 1.", may_exceed_one=True),
    _sensor("pcie_generation", "Current generation of the PCIe link."),
    _sensor("pcie_generation_max", "Highest PCIe generation that the device and the slot support."),
    _sensor("pcie_width", "Current number of PCIe lanes."),
    _sensor("pcie_width_max", "Highest number of PCIe lanes that the device and the slot support."),
    _sensor(
        "pcie_receive_bytes_per_second",
        "PCIe traffic from the host to the device, sampled for 20 ms every ten seconds.",
    ),
    _sensor(
        "pcie_transmit_bytes_per_second",
        "PCIe traffic from the device to the host, sampled for 20 ms every ten seconds.",
    ),
    _counter("pcie_replays", "Packets retransmitted on the PCIe link.", "pcie_replays_total"),
    _sensor("persistence_mode", "1 if the driver stays loaded while no process uses the device.", is_boolean=True),
    *(
        _counter(
            f"ecc_{kind}_{scope}",
            f"{kind.capitalize()} ECC errors {since}.",
            "ecc_errors_total",
            kind=kind,
            scope=scope,
        )
        for kind in ("corrected", "uncorrected")
        for scope, since in (
            ("volatile", "since the driver was loaded (volatile counter)"),
            ("aggregate", "over the lifetime of the device (aggregate counter)"),
        )
    ),
    _counter(
        "retired_pages_single_bit",
        "Memory pages retired after several corrected errors (before Ampere).",
        "retired_pages",
        cause="single_bit",
    ),
    _counter(
        "retired_pages_double_bit",
        "Memory pages retired after an uncorrected error (before Ampere).",
        "retired_pages",
        cause="double_bit",
    ),
    _sensor("retired_pages_pending", "1 if pages will be retired at the next reset.", is_boolean=True),
    _counter(
        "remapped_rows_correctable",
        "Memory rows remapped to spare rows after corrected errors (Ampere and later).",
        "remapped_rows",
        cause="correctable",
    ),
    _counter(
        "remapped_rows_uncorrectable",
        "Memory rows remapped to spare rows after an uncorrected error (Ampere and later).",
        "remapped_rows",
        cause="uncorrectable",
    ),
    _sensor("remapped_rows_pending", "1 if rows will be remapped at the next reset.", is_boolean=True),
    _sensor("remapped_rows_failed", "1 if remapping a row has failed; the device should be replaced.", is_boolean=True),
    *(
        _counter(f"nvlink_{kind}_errors", f"{text} on the device's NVLinks.", "nvlink_errors_total", kind=kind)
        for kind, text in (
            ("crc_flit", "CRC errors in flits"),
            ("crc_data", "CRC errors in data"),
            ("replay", "Replays"),
            ("recovery", "Recoveries"),
        )
    ),
    _sensor(
        "file_cache_bytes",
        "The host kernel's page cache in device memory (Grace Hopper). It counts as unattributed, and the kernel frees "
        "it when memory is low.",
    ),
    _sensor("xid_events", "1 if the driver reports Xid errors as they occur, else 0.", is_boolean=True, family=""),
)

SHARED_FAMILIES = {
    "temperature_celsius": "Temperature by sensor.",
    "temperature_limit_celsius": "GPU temperature at which the hardware slows down or shuts down.",
    "ecc_errors_total": "ECC errors since the driver was loaded (volatile) and over the lifetime of the device "
    "(aggregate).",
    "retired_pages": "Retired memory pages (before Ampere).",
    "remapped_rows": "Memory rows remapped to spare rows (Ampere and later).",
    "nvlink_errors_total": "Errors on the device's NVLinks, by kind.",
}
"""HELP texts of the families with several sensors; others have the text of their sensor."""

DRIVER_UP = Quantity[Snapshot](
    "driver_up",
    "1 if the devices can be read, else 0.",
    lambda row: None if row.source.reason in (STARTING, RELEASED, NO_DEVICE) else float(row.source.up),
    is_boolean=True,
    note=" Absent on a machine without a device.",
    rule_note=" Unknown before the first attempt, while gpumond is detached from the driver, and without any device.",
    export=lambda row: None if row.source.reason == NO_DEVICE else float(row.source.up),
)
DRIVER_RESPONSIVE = Quantity[Snapshot](
    "driver_responsive",
    "0 while a driver call exceeds its deadline, else 1.",
    lambda row: float(row.source.responsive),
    is_boolean=True,
)
STORE_WRITABLE = Quantity[Snapshot](
    "store_writable",
    "1 while changes and alerts can be written to disk, else 0.",
    lambda row: float_or_none(row.store_writable),
    is_boolean=True,
)

DEVICE_COUNTERS = tuple(quantity.name for quantity in SENSOR_QUANTITIES if quantity.is_counter)
