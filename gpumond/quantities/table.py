"""Sensors of a device: one table, from which the metric families, the values of rules and both reference pages derive.

Performs no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from gpumond.facts.units import duration, human

Unit = Literal["bytes", "bytes/s", "seconds", "ratio", "count", "boolean", "celsius", "hertz", "watts", "joules"]
"""Unit of a value; a boolean is 0 or 1."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """One field of `Sensors`, by its name, which is also the name of the rule value.

    ``family`` is its metric family without the prefix ``gpumond_device_``: a counter if it ends in ``_total``, empty
    if the field is no metric. ``labels`` distinguish the quantities of one family. ``counted``: the field counts
    events, and its increase within the window of rules is another rule value.
    """

    name: str
    unit: Unit
    text: str
    family: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    counted: bool = False

    @property
    def metric(self) -> str:
        return self.name if self.family is None else self.family


def _counter(name: str, text: str, family: str, **labels: str) -> Quantity:
    return Quantity(name, "count", text, family, labels, counted=True)


def _temperature(name: str, text: str, family: str, **labels: str) -> Quantity:
    return Quantity(f"{name}_temperature_celsius", "celsius", text, family, labels)


GPM = "measured by the hardware over the last ten seconds (Hopper and later)"

SENSORS: tuple[Quantity, ...] = (
    Quantity("bar1_size_bytes", "bytes", "Size of the BAR1 window, through which the host accesses device memory."),
    Quantity("bar1_used_bytes", "bytes", "Mapped part of the BAR1 window."),
    Quantity(
        "gpu_utilization_ratio",
        "ratio",
        "Fraction of the driver's last sampling period during which a kernel was running.",
    ),
    Quantity(
        "memory_controller_utilization_ratio",
        "ratio",
        "Fraction of the driver's last sampling period during which memory was read or written. Not memory usage.",
    ),
    Quantity(
        "encoder_utilization_ratio",
        "ratio",
        "Fraction of the sampling period during which the video encoder was active.",
    ),
    Quantity(
        "decoder_utilization_ratio",
        "ratio",
        "Fraction of the sampling period during which the video decoder was active.",
    ),
    Quantity("graphics_engine_active_ratio", "ratio", f"Fraction of time during which a kernel was running, {GPM}."),
    Quantity("sm_active_ratio", "ratio", f"Fraction of the multiprocessors that were active, {GPM}."),
    Quantity(
        "sm_occupancy_ratio", "ratio", f"Resident warps as a fraction of the maximum on the multiprocessors, {GPM}."
    ),
    Quantity("tensor_active_ratio", "ratio", f"Fraction of time during which the tensor cores were active, {GPM}."),
    Quantity("dram_active_ratio", "ratio", f"Fraction of the memory bandwidth in use, {GPM}."),
    Quantity("nvlink_receive_bytes_per_second", "bytes/s", f"Traffic received over all NVLinks, {GPM}."),
    Quantity("nvlink_transmit_bytes_per_second", "bytes/s", f"Traffic sent over all NVLinks, {GPM}."),
    Quantity("sm_clock_hertz", "hertz", "Clock frequency of the multiprocessors."),
    Quantity("sm_clock_max_hertz", "hertz", "Maximum clock frequency of the multiprocessors."),
    Quantity("memory_clock_hertz", "hertz", "Clock frequency of the memory."),
    Quantity("memory_clock_max_hertz", "hertz", "Maximum clock frequency of the memory."),
    Quantity("performance_state", "count", "Performance state, from 0 (fastest) to 15 (slowest)."),
    _temperature("gpu", "Temperature of the GPU.", "temperature_celsius", sensor="gpu"),
    _temperature("memory", "Temperature of the memory.", "temperature_celsius", sensor="memory"),
    _temperature(
        "slowdown", "GPU temperature at which the hardware slows down.", "temperature_limit_celsius", limit="slowdown"
    ),
    _temperature(
        "shutdown", "GPU temperature at which the hardware shuts down.", "temperature_limit_celsius", limit="shutdown"
    ),
    Quantity("power_watts", "watts", "Power draw of the device."),
    Quantity("power_limit_watts", "watts", "Enforced power limit."),
    Quantity(
        "energy_joules", "joules", "Energy consumed since the driver was loaded.", "energy_joules_total", counted=True
    ),
    Quantity("fan_speed_ratio", "ratio", "Target fan speed as a fraction of the maximum; may exceed 1."),
    Quantity("pcie_generation", "count", "Current generation of the PCIe link."),
    Quantity("pcie_generation_max", "count", "Highest PCIe generation that the device and the slot support."),
    Quantity("pcie_width", "count", "Current number of PCIe lanes."),
    Quantity("pcie_width_max", "count", "Highest number of PCIe lanes that the device and the slot support."),
    Quantity(
        "pcie_receive_bytes_per_second",
        "bytes/s",
        "PCIe traffic from the host to the device, sampled for 20 ms every ten seconds.",
    ),
    Quantity(
        "pcie_transmit_bytes_per_second",
        "bytes/s",
        "PCIe traffic from the device to the host, sampled for 20 ms every ten seconds.",
    ),
    _counter("pcie_replays", "Packets retransmitted on the PCIe link.", "pcie_replays_total"),
    Quantity("persistence_mode", "boolean", "1 if the driver stays loaded while no process uses the device."),
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
    Quantity("retired_pages_pending", "boolean", "1 if pages will be retired at the next reset."),
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
    Quantity("remapped_rows_pending", "boolean", "1 if rows will be remapped at the next reset."),
    Quantity("remapped_rows_failed", "boolean", "1 if remapping a row has failed; the device should be replaced."),
    *(
        _counter(f"nvlink_{kind}_errors", f"{text} on all NVLinks of the device.", "nvlink_errors_total", kind=kind)
        for kind, text in (
            ("crc_flit", "CRC errors of flits"),
            ("crc_data", "CRC errors of data"),
            ("replay", "Replays"),
            ("recovery", "Recoveries"),
        )
    ),
    Quantity(
        "file_cache_bytes",
        "bytes",
        "Page cache of the host's kernel in device memory that is a NUMA node (Grace Hopper). It is unclaimed, and "
        "the kernel frees it when memory is low.",
    ),
    Quantity("xid_events", "boolean", "1 while the driver reports XID errors when they occur.", family=""),
)

DEVICE_COUNTERS = tuple(quantity.name for quantity in SENSORS if quantity.counted)
"""Counters of Sensors whose increase is a rule value."""


def readable(unit: Unit, value: float) -> str:
    """Format a value with its unit."""
    if unit == "bytes":
        return human(value)
    if unit == "bytes/s":
        return f"{human(60 * value)}/min"
    if unit == "seconds":
        return duration(value)
    if unit == "ratio":
        return f"{100 * value:.1f} %"
    if unit == "hertz":
        return f"{value / 1e6:.0f} MHz"
    return f"{value:g}{SYMBOLS.get(unit, '')}"


SYMBOLS: Mapping[Unit, str] = {"celsius": " °C", "watts": " W", "joules": " J"}
