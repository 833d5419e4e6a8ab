"""Values of rules that `/metrics` exports too: one table, from which both and their reference pages derive.

The table has the quantities that are read from one fact: a device, a pool, a process, a program, an engine. Values of
rules that need more than that are beside the rows of their scope, and families without a value of rules in `metrics`.
Performs no I/O.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from gpumond.facts.engines import NOT_READ, EngineReading
from gpumond.facts.pools import HostPool, PoolUsage
from gpumond.facts.program import Program, StepUsage
from gpumond.facts.shares import HELD as HELD_MEANING, MEANINGS
from gpumond.facts.snapshot import NO_DEVICE, RELEASED, STARTING, AgentReport, DeviceReading, ProcessUsage, Snapshot
from gpumond.quantities.quantity import Quantity, Unit, number


def _field(
    name: str, unit: Unit, text: str, family: str | None = None, *, field: str = "", **options: Any
) -> Quantity[Any]:
    """Return the quantity that a fact has as an attribute: ``field``, or that of its name."""
    return Quantity(name, unit, text, attrgetter(field or name), family, **options)


DEVICE_UP = Quantity[DeviceReading](
    "up", "boolean", "1 while the device responds to its driver, else 0.", lambda device: float(device.up)
)
DEVICE_IDLE: Quantity[DeviceReading] = _field(
    "idle_seconds",
    "seconds",
    "Time without activity on the device, according to the driver's samples since the daemon started.",
)
MEMORY: tuple[Quantity[DeviceReading], ...] = (
    _field("size_bytes", "bytes", "Total memory of the device.", "memory_size_bytes"),
    _field(
        "used_bytes",
        "bytes",
        "Memory in use as reported by the driver, excluding its own reservation if that is known.",
        "memory_used_bytes",
    ),
    _field("free_bytes", "bytes", "Free memory as reported by the driver.", "memory_free_bytes"),
    _field("reserved_bytes", "bytes", "Memory reserved by the driver.", "memory_reserved_bytes"),
)


def _sensor(name: str, unit: Unit, text: str, family: str | None = None, **options: Any) -> Quantity[DeviceReading]:
    """Return the quantity of the field of `Sensors` with this name."""
    return _field(name, unit, text, family, field=f"sensors.{name}", **options)


def _counter(name: str, text: str, family: str, **labels: str) -> Quantity[DeviceReading]:
    return _sensor(name, "count", text, family, labels=labels, counted=True)


def _temperature(name: str, text: str, family: str, **labels: str) -> Quantity[DeviceReading]:
    return _sensor(f"{name}_temperature_celsius", "celsius", text, family, labels=labels)


GPM = "measured by the hardware over the last ten seconds (Hopper and later)"

SENSORS: tuple[Quantity[DeviceReading], ...] = (
    _sensor("bar1_size_bytes", "bytes", "Size of the BAR1 window, through which the host accesses device memory."),
    _sensor("bar1_used_bytes", "bytes", "Mapped part of the BAR1 window."),
    _sensor(
        "gpu_utilization_ratio",
        "ratio",
        "Fraction of the driver's last sampling period during which a kernel was running.",
    ),
    _sensor(
        "memory_controller_utilization_ratio",
        "ratio",
        "Fraction of the driver's last sampling period during which memory was read or written. Not memory usage.",
    ),
    _sensor(
        "encoder_utilization_ratio",
        "ratio",
        "Fraction of the sampling period during which the video encoder was active.",
    ),
    _sensor(
        "decoder_utilization_ratio",
        "ratio",
        "Fraction of the sampling period during which the video decoder was active.",
    ),
    _sensor("graphics_engine_active_ratio", "ratio", f"Fraction of time during which a kernel was running, {GPM}."),
    _sensor("sm_active_ratio", "ratio", f"Fraction of the SMs that were active, {GPM}."),
    _sensor("sm_occupancy_ratio", "ratio", f"Resident warps as a fraction of the SMs' maximum, {GPM}."),
    _sensor("tensor_active_ratio", "ratio", f"Fraction of time during which the tensor cores were active, {GPM}."),
    _sensor("dram_active_ratio", "ratio", f"Fraction of the memory bandwidth in use, {GPM}."),
    _sensor("nvlink_receive_bytes_per_second", "bytes/s", f"Traffic received over all NVLinks, {GPM}."),
    _sensor("nvlink_transmit_bytes_per_second", "bytes/s", f"Traffic sent over all NVLinks, {GPM}."),
    _sensor("sm_clock_hertz", "hertz", "SM clock frequency."),
    _sensor("sm_clock_max_hertz", "hertz", "Maximum SM clock frequency."),
    _sensor("memory_clock_hertz", "hertz", "Clock frequency of the memory."),
    _sensor("memory_clock_max_hertz", "hertz", "Maximum clock frequency of the memory."),
    _sensor("performance_state", "count", "Performance state, from 0 (fastest) to 15 (slowest)."),
    _temperature("gpu", "Temperature of the GPU.", "temperature_celsius", sensor="gpu"),
    _temperature("memory", "Temperature of the memory.", "temperature_celsius", sensor="memory"),
    _temperature(
        "slowdown", "GPU temperature at which the hardware slows down.", "temperature_limit_celsius", limit="slowdown"
    ),
    _temperature(
        "shutdown", "GPU temperature at which the hardware shuts down.", "temperature_limit_celsius", limit="shutdown"
    ),
    _sensor("power_watts", "watts", "Power draw of the device."),
    _sensor("power_limit_watts", "watts", "Enforced power limit."),
    _sensor(
        "energy_joules", "joules", "Energy consumed since the driver was loaded.", "energy_joules_total", counted=True
    ),
    _sensor("fan_speed_ratio", "ratio", "Target fan speed as a fraction of the maximum; may exceed 1."),
    _sensor("pcie_generation", "count", "Current generation of the PCIe link."),
    _sensor("pcie_generation_max", "count", "Highest PCIe generation that the device and the slot support."),
    _sensor("pcie_width", "count", "Current number of PCIe lanes."),
    _sensor("pcie_width_max", "count", "Highest number of PCIe lanes that the device and the slot support."),
    _sensor(
        "pcie_receive_bytes_per_second",
        "bytes/s",
        "PCIe traffic from the host to the device, sampled for 20 ms every ten seconds.",
    ),
    _sensor(
        "pcie_transmit_bytes_per_second",
        "bytes/s",
        "PCIe traffic from the device to the host, sampled for 20 ms every ten seconds.",
    ),
    _counter("pcie_replays", "Packets retransmitted on the PCIe link.", "pcie_replays_total"),
    _sensor("persistence_mode", "boolean", "1 if the driver stays loaded while no process uses the device."),
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
    _sensor("retired_pages_pending", "boolean", "1 if pages will be retired at the next reset."),
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
    _sensor("remapped_rows_pending", "boolean", "1 if rows will be remapped at the next reset."),
    _sensor("remapped_rows_failed", "boolean", "1 if remapping a row has failed; the device should be replaced."),
    *(
        _counter(f"nvlink_{kind}_errors", f"{text} on all NVLinks of the device.", "nvlink_errors_total", kind=kind)
        for kind, text in (
            ("crc_flit", "CRC errors of flits"),
            ("crc_data", "CRC errors of data"),
            ("replay", "Replays"),
            ("recovery", "Recoveries"),
        )
    ),
    _sensor(
        "file_cache_bytes",
        "bytes",
        "Page cache of the host's kernel in device memory that is a NUMA node (Grace Hopper). It is unattributed, and "
        "the kernel frees it when memory is low.",
    ),
    _sensor("xid_events", "boolean", "1 while the driver reports Xid errors when they occur.", family=""),
)

SHARED_FAMILIES = {
    "temperature_celsius": "Temperature by sensor.",
    "temperature_limit_celsius": "GPU temperature at which the hardware slows down or shuts down.",
    "ecc_errors_total": "ECC errors since the driver was loaded (volatile) and over the lifetime of the device "
    "(aggregate).",
    "retired_pages": "Retired memory pages (before Ampere).",
    "remapped_rows": "Memory rows remapped to spare rows (Ampere and later).",
    "nvlink_errors_total": "Errors on all NVLinks of the device by kind.",
}
"""HELP texts of the families with several sensors; others have the text of their sensor."""

PROCESS_USED: Quantity[ProcessUsage] = _field(
    "used_bytes", "bytes", "Device memory used by the process, as reported by the driver.", "memory_used_bytes"
)
PROCESS_UTILIZATION: Quantity[ProcessUsage] = _field(
    "utilization_ratio",
    "ratio",
    "Recent utilization of the device's busiest engine by the process.",
    note=" Exported for processes that have gpumond_process_memory_used_bytes, if the driver reports utilization per "
    "process.",
)

REPORT_AGE: Quantity[AgentReport] = _field(
    "report_age_seconds",
    "seconds",
    "Age of the agent's most recent report.",
    "agent_report_age_seconds",
    field="age_seconds",
)


def _stranded(pool: PoolUsage) -> int | None:
    return None if pool.live_bytes is None else pool.stranded_bytes


def _reported_reclaimable(pool: PoolUsage) -> int | None:
    """Return the reclaimable bytes. If the library does not report its held bytes, only "not releasable" is known."""
    known = (pool.held_known and pool.live_bytes is not None) or pool.reclaimable.exactness == "not_releasable"
    return pool.reclaimable.likely if known else None


LIVE: Quantity[PoolUsage] = _field(
    "live_bytes",
    "bytes",
    MEANINGS["live"],
    note=" Absent if nothing counts it.",
    rule_note=" Unknown if nothing counts it.",
)
HELD: Quantity[PoolUsage] = _field(
    "held_bytes",
    "bytes",
    HELD_MEANING,
    note=" Absent if the library doesn't report it.",
    export=lambda pool: pool.held_bytes if pool.held_known else None,
)
RECLAIMABLE: Quantity[PoolUsage] = _field(
    "reclaimable_bytes",
    "bytes",
    "Memory that a flush would release, as expected by the allocator's adapter.",
    export=_reported_reclaimable,
    field="reclaimable.likely",
)
STRANDED = Quantity[PoolUsage](
    "stranded_bytes",
    "bytes",
    MEANINGS["stranded"],
    _stranded,
    export=lambda pool: _stranded(pool) if pool.held_known else None,
)
UNMAPPED: Quantity[PoolUsage] = _field(
    "unmapped_bytes",
    "bytes",
    MEANINGS["unmapped"],
    note=" Absent if it is unknown.",
)


POOL: tuple[Quantity[PoolUsage], ...] = (
    LIVE,
    _field(
        "live_allocations",
        "count",
        "Allocations that the program hasn't freed.",
        note=" Absent if the allocator doesn't count them.",
    ),
    _field("peak_live_bytes", "bytes", "Peak live memory, as recorded by the allocator; the program may reset it."),
    HELD,
    RECLAIMABLE,
    STRANDED,
    _field("spillable_bytes", "bytes", "Live memory that the flush step spill would move to the host."),
    UNMAPPED,
    _field("ooms", "count", "Out-of-memory errors raised by the allocator.", "ooms_total"),
    _field(
        "retries", "count", "Allocations that succeeded only after the allocator flushed its cache.", "retries_total"
    ),
    _field(
        "device_allocations",
        "count",
        "Memory allocations that the allocator requested from the driver.",
        "device_allocations_total",
        counted=True,
    ),
    _field(
        "device_frees",
        "count",
        "Memory allocations that the allocator returned to the driver.",
        "device_frees_total",
        counted=True,
    ),
    _field(
        "refilled_flushes",
        "count",
        "Flushes whose released memory the program immediately reallocated from the driver.",
        "refilled_flushes_total",
        counted=True,
    ),
    _field("peak_held_bytes", "bytes", "Peak held memory, as recorded by the allocator.", family=""),
    _field("private_bytes", "bytes", "Held memory of private pools (CUDA graphs, `MemPool`).", family=""),
)

HOST_POOL: tuple[Quantity[HostPool], ...] = tuple(
    Quantity(
        f"host_{name}",
        "bytes",
        f"Pinned host memory {meaning}. This isn't device memory.",
        attrgetter(name),
        f"host_pool_{name}",
    )
    for name, meaning in (("live_bytes", "allocated to the program"), ("held_bytes", "held by the allocator"))
)

STEP: tuple[Quantity[StepUsage], ...] = (
    _field("steps", "count", "Steps that the program has completed.", "steps_total", counted=True),
    _field("steps_per_second", "count", "Rate of the last steps, in steps per second.", ""),
    _field(
        "step_retained_bytes",
        "bytes",
        "Growth of live memory per step, as the trend over the last steps.",
        field="retained_bytes",
    ),
    _field("step_live_bytes", "bytes", "Live memory at the end of a step.", field="live_bytes"),
    _field("step_stranded_bytes", "bytes", "Stranded memory at the end of a step.", field="stranded_bytes"),
    _field(
        "step_retries",
        "count",
        "Allocations since the first step that succeeded only after the allocator had emptied its own cache.",
        "step_retries_total",
        counted=True,
        field="retries",
    ),
)

PROGRAM: tuple[Quantity[Program], ...] = (
    _field(
        "oom_retries",
        "count",
        "Retries by retry_on_oom, with the same or smaller arguments.",
        "oom_retries_total",
        counted=True,
    ),
    _field(
        "oom_recovered",
        "count",
        "Calls that succeeded after a retry by retry_on_oom.",
        "oom_recovered_total",
        counted=True,
    ),
    _field(
        "refusals",
        "count",
        "Daemons and commands that the program's agent refused: untrusted, malformed, or above its rate limit.",
        "agent_commands_refused_total",
        counted=True,
    ),
)

ENGINE: tuple[Quantity[EngineReading], ...] = (
    Quantity(
        "up",
        "boolean",
        "1 if the serving engine responds, else 0.",
        lambda engine: None if engine.problem == NOT_READ else float(engine.up),
        rule_note=" Unknown before the first read.",
    ),
    _field(
        "kv_cache_used_ratio",
        "ratio",
        "Fraction of the engine's KV cache that requests use. The whole cache occupies device memory, used or not.",
    ),
    _field("running_requests", "count", "Requests that the engine is processing.", "requests_running", field="running"),
    _field("waiting_requests", "count", "Requests waiting in the engine's queue.", "requests_waiting", field="waiting"),
    _field("sleeping", "boolean", "1 if the engine is in sleep mode, else 0."),
    _field("paused", "boolean", "1 if the engine is paused, else 0."),
    Quantity(
        "out_of_service_seconds",
        "seconds",
        "Time since a release after which the engine hasn't resumed serving, although gpumond keeps trying.",
        lambda engine: engine.out_of_service_seconds or 0.0,
        note=" Absent otherwise.",
        rule_note=" 0 otherwise.",
        export=attrgetter("out_of_service_seconds"),
    ),
    _field(
        "idle_seconds",
        "seconds",
        "Time without a request and without work on a device, as far as the engine and the driver report it.",
    ),
    Quantity(
        "models",
        "count",
        "Models that the engine has loaded, as it lists them.",
        lambda engine: len(engine.models) if engine.up else None,
        "models_loaded",
        rule_note=" Unknown while it doesn't respond.",
    ),
    _field("held_bytes", "bytes", "Device memory that the engine reports as its own."),
    _field("kv_cache_bytes", "bytes", "Size of the engine's KV cache.", ""),
    _field("state_age_seconds", "seconds", "Age of the engine's latest state.", "", field="age_seconds"),
)

ENGINE_USED = Quantity[int](
    "used_bytes",
    "bytes",
    "Device memory used by the engine's processes, as reported by the driver.",
    float,
    "memory_used_bytes",
)
"""Of the driver's counts; `/metrics` has them by device, and rules their sum."""

DRIVER_UP = Quantity[Snapshot](
    "driver_up",
    "boolean",
    "1 if the devices can be read, else 0.",
    lambda row: None if row.source.reason in (STARTING, RELEASED, NO_DEVICE) else float(row.source.up),
    note=" Absent on a machine without a device.",
    rule_note=" Unknown before the first attempt and without any device.",
    export=lambda row: None if row.source.reason == NO_DEVICE else float(row.source.up),
)
DRIVER_RESPONSIVE = Quantity[Snapshot](
    "driver_responsive",
    "boolean",
    "0 while a driver call exceeds its deadline, else 1.",
    lambda row: float(row.source.responsive),
)
STORE_WRITABLE = Quantity[Snapshot](
    "store_writable",
    "boolean",
    "1 while changes and alerts can be written to disk, else 0.",
    lambda row: number(row.store_writable),
)

DEVICE_COUNTERS = tuple(quantity.name for quantity in SENSORS if quantity.counted)
POOL_COUNTERS = tuple(quantity.name for quantity in POOL if quantity.counted)
PROGRAM_COUNTERS = (
    *(quantity.name for quantity in STEP if quantity.counted),
    *(quantity.name for quantity in PROGRAM if quantity.counted),
)
"""Counters of one subject whose increase within the window of rules is a rule value."""
