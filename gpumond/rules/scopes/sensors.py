"""Values of rules from the sensors, settings and error counters of devices. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Protocol

from gpumond.model.sensors import THROTTLE_REASONS, Sensors
from gpumond.model.snapshot import DeviceReading
from gpumond.rules import Unit, readable
from gpumond.rules.counters import combined
from gpumond.rules.scopes.context import FROM_A_FULL_WINDOW, IN_WINDOW, RuleAttribute, number, ratio
from gpumond.rules.window import DEVICE_COUNTERS, RuleWindow

LOADED_RATIO = 0.5
"""Utilisation from which a slow PCIe link is a deficit: an idle device slows its link down to save power."""

THERMAL_REASONS = ("sw_thermal_slowdown", "hw_thermal_slowdown")
SINCE_LOADED = "since the driver was loaded"
IN_LIFETIME = "in the lifetime of the device"
COUNTED = "counted by the hardware (Hopper and later)"


class DeviceRow(Protocol):
    """A row of one device."""

    @property
    def device(self) -> DeviceReading: ...
    @property
    def recent(self) -> RuleWindow: ...


Read = Callable[[Sensors], float | None]
DeviceAttribute = RuleAttribute[DeviceRow]


def _derived(name: str, unit: Unit, meaning: str, read: Read) -> DeviceAttribute:
    return RuleAttribute(name, unit, meaning, lambda row: read(row.device.sensors))


def _sensor(name: str, unit: Unit, meaning: str) -> DeviceAttribute:
    value: Callable[[Sensors], float | None] = attrgetter(name)
    return _derived(name, unit, meaning, lambda sensors: number(value(sensors)))


def _throttle(*reasons: str) -> Read:
    def read(sensors: Sensors) -> float | None:
        active = sensors.throttle_reasons
        return None if active is None else float(any(reason in active for reason in reasons))

    return read


def _increase(counter: str) -> Callable[[DeviceRow], float | None]:
    position = DEVICE_COUNTERS.index(counter)

    def read(row: DeviceRow) -> float | None:
        history = row.recent.devices.get(row.device.uuid)
        count = getattr(row.device.sensors, counter)
        return None if history is None else history.increase(position, count, row.recent.elapsed)

    return read


def _grown(name: str, unit: Unit, meaning: str, *counters: str) -> DeviceAttribute:
    increases = tuple(map(_increase, counters))
    return RuleAttribute(
        name,
        unit,
        f"{meaning} {IN_WINDOW}; {FROM_A_FULL_WINDOW}",
        lambda row: combined(tuple(increase(row) for increase in increases)),
    )


def _counter(name: str, meaning: str, start: str) -> tuple[DeviceAttribute, DeviceAttribute]:
    """Return the value of a counter, and that of its increase."""
    return _sensor(name, "count", f"{meaning} {start}"), _grown(f"{name}_increase", "count", meaning, name)


def pcie_link_ratio(sensors: Sensors) -> float | None:
    """Return the link's bandwidth over its maximum, where each generation doubles that of a lane."""
    width = ratio(sensors.pcie_width, sensors.pcie_width_max)
    generation, most = sensors.pcie_generation, sensors.pcie_generation_max
    if width is None or generation is None or most is None:
        return None
    return min(1.0, width * 2.0 ** (generation - most))


def _pcie_link_deficit(sensors: Sensors) -> float | None:
    part, busy = pcie_link_ratio(sensors), sensors.gpu_utilization_ratio
    if part is None or busy is None:
        return None
    return 1.0 - part if busy >= LOADED_RATIO else 0.0


SENSORS: tuple[DeviceAttribute, ...] = (
    _sensor("gpu_utilization_ratio", "ratio", "part of the driver's last sampling period in which a kernel ran"),
    _sensor(
        "memory_controller_utilization_ratio",
        "ratio",
        "part of the driver's last sampling period in which memory was read or written",
    ),
    _sensor("encoder_utilization_ratio", "ratio", "part of the sampling period in which the video encoder was active"),
    _sensor("decoder_utilization_ratio", "ratio", "part of the sampling period in which the video decoder was active"),
    _sensor("graphics_engine_active_ratio", "ratio", f"part of the time in which a kernel ran, {COUNTED}"),
    _sensor("sm_active_ratio", "ratio", f"part of the multiprocessors that were active, {COUNTED}"),
    _sensor("sm_occupancy_ratio", "ratio", f"resident warps over their maximum, {COUNTED}"),
    _sensor("tensor_active_ratio", "ratio", f"part of the time in which the tensor cores were active, {COUNTED}"),
    _sensor("dram_active_ratio", "ratio", f"part of the memory bandwidth in use, {COUNTED}"),
    _sensor("nvlink_receive_bytes_per_second", "bytes/s", f"traffic received over all NVLinks, {COUNTED}"),
    _sensor("nvlink_transmit_bytes_per_second", "bytes/s", f"traffic sent over all NVLinks, {COUNTED}"),
    _sensor("gpu_temperature_celsius", "celsius", "temperature of the GPU"),
    _sensor("memory_temperature_celsius", "celsius", "temperature of the memory"),
    _sensor("slowdown_temperature_celsius", "celsius", "temperature of the GPU at which the hardware slows down"),
    _sensor("shutdown_temperature_celsius", "celsius", "temperature of the GPU at which the hardware shuts down"),
    _sensor("power_watts", "watts", "power draw"),
    _sensor("power_limit_watts", "watts", "enforced limit of the power draw"),
    _derived(
        "power_limit_ratio",
        "ratio",
        "power draw over its limit",
        lambda sensors: ratio(sensors.power_watts, sensors.power_limit_watts),
    ),
    _sensor("energy_joules", "joules", f"energy {SINCE_LOADED}"),
    _grown("energy_increase_joules", "joules", "energy", "energy_joules"),
    _sensor("sm_clock_hertz", "hertz", "clock frequency of the multiprocessors"),
    _sensor("sm_clock_max_hertz", "hertz", "maximum clock frequency of the multiprocessors"),
    _sensor("memory_clock_hertz", "hertz", "clock frequency of the memory"),
    _sensor("memory_clock_max_hertz", "hertz", "maximum clock frequency of the memory"),
    _sensor("performance_state", "count", "performance state, from 0 (fastest) to 15 (slowest)"),
    *(
        _derived(
            f"throttle_{reason}",
            "boolean",
            f"1 while the clocks are reduced for the reason `{reason}`, else 0",
            _throttle(reason),
        )
        for reason in THROTTLE_REASONS
    ),
    _derived(
        "throttle_thermal",
        "boolean",
        f"1 while the clocks are reduced because of the temperature ({' or '.join(THERMAL_REASONS)}), else 0",
        _throttle(*THERMAL_REASONS),
    ),
    _sensor("fan_speed_ratio", "ratio", "target fan speed over its maximum; may exceed 1"),
    _sensor("persistence_mode", "boolean", "1 if the driver remains loaded while no process uses the device, else 0"),
    _sensor("bar1_size_bytes", "bytes", "size of the BAR1 window, through which the host accesses device memory"),
    _sensor("bar1_used_bytes", "bytes", "mapped part of the BAR1 window"),
    _derived(
        "bar1_used_ratio",
        "ratio",
        "mapped part of the BAR1 window over its size",
        lambda sensors: ratio(sensors.bar1_used_bytes, sensors.bar1_size_bytes),
    ),
    _sensor("pcie_generation", "count", "generation of the PCIe link"),
    _sensor("pcie_generation_max", "count", "highest PCIe generation that device and slot support"),
    _sensor("pcie_width", "count", "lanes of the PCIe link"),
    _sensor("pcie_width_max", "count", "highest number of PCIe lanes that device and slot support"),
    _derived(
        "pcie_link_ratio",
        "ratio",
        "bandwidth of the PCIe link over its maximum, from lanes and generation; an idle device slows its link down",
        pcie_link_ratio,
    ),
    _derived(
        "pcie_link_deficit_ratio",
        "ratio",
        f"1 - `pcie_link_ratio` while `gpu_utilization_ratio` is at least {LOADED_RATIO:.0%}, otherwise 0",
        _pcie_link_deficit,
    ),
    _sensor("pcie_receive_bytes_per_second", "bytes/s", "PCIe traffic from the host to the device"),
    _sensor("pcie_transmit_bytes_per_second", "bytes/s", "PCIe traffic from the device to the host"),
    *_counter("pcie_replays", "packets sent again over the PCIe link", SINCE_LOADED),
    *_counter("ecc_corrected_volatile", "corrected ECC errors, volatile counter,", SINCE_LOADED),
    *_counter("ecc_corrected_aggregate", "corrected ECC errors, aggregate counter,", IN_LIFETIME),
    *_counter("ecc_uncorrected_volatile", "uncorrected ECC errors, volatile counter,", SINCE_LOADED),
    *_counter("ecc_uncorrected_aggregate", "uncorrected ECC errors, aggregate counter,", IN_LIFETIME),
    *_counter("retired_pages_single_bit", "memory pages retired after several corrected errors", IN_LIFETIME),
    *_counter("retired_pages_double_bit", "memory pages retired after an uncorrected error", IN_LIFETIME),
    _sensor("retired_pages_pending", "boolean", "1 if pages will be retired at the next reset, else 0"),
    *_counter("remapped_rows_correctable", "memory rows remapped after corrected errors", IN_LIFETIME),
    *_counter("remapped_rows_uncorrectable", "memory rows remapped after an uncorrected error", IN_LIFETIME),
    _sensor("remapped_rows_pending", "boolean", "1 if rows will be remapped at the next reset, else 0"),
    _sensor("remapped_rows_failed", "boolean", "1 if the remapping of a row has failed, else 0"),
    *_counter("nvlink_crc_flit_errors", "CRC errors of flits on all NVLinks", SINCE_LOADED),
    *_counter("nvlink_crc_data_errors", "CRC errors of data on all NVLinks", SINCE_LOADED),
    *_counter("nvlink_replay_errors", "replays on all NVLinks", SINCE_LOADED),
    *_counter("nvlink_recovery_errors", "recoveries of all NVLinks", SINCE_LOADED),
    _grown(
        "nvlink_errors_increase",
        "count",
        "errors of all kinds on all NVLinks",
        *(name for name in DEVICE_COUNTERS if name.startswith("nvlink_")),
    ),
    _sensor("xid_events", "boolean", "1 while the driver reports XID errors when they occur, else 0"),
    _sensor("file_cache_bytes", "bytes", "the kernel's file cache in device memory that is a NUMA node"),
)

SENSOR_PLACEHOLDERS = {
    "temperature": "temperature of the GPU",
    "power": "power draw",
    "power_limit": "limit of the power draw",
    "throttle_reasons": "reasons for which the clocks are reduced",
    "pcie_link": "generation and lanes of the PCIe link",
    "pcie_link_max": "highest generation and lanes of the PCIe link",
}


def sensor_texts(sensors: Sensors) -> dict[str, str]:
    return {
        "temperature": _text("celsius", sensors.gpu_temperature_celsius),
        "power": _text("watts", sensors.power_watts),
        "power_limit": _text("watts", sensors.power_limit_watts),
        "throttle_reasons": ", ".join(sensors.throttle_reasons or ()) or "none known",
        "pcie_link": _link(sensors.pcie_generation, sensors.pcie_width),
        "pcie_link_max": _link(sensors.pcie_generation_max, sensors.pcie_width_max),
    }


def _text(unit: Unit, value: float | None) -> str:
    return "unknown" if value is None else readable(unit, value)


def _link(generation: int | None, width: int | None) -> str:
    return f"generation {'?' if generation is None else generation} x{'?' if width is None else width}"
