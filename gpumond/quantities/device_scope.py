"""Rules on devices: memory, sensors, settings and error counters. No I/O."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

from gpumond.facts.frame import LedgerLine, Verdict
from gpumond.facts.program import ProcessKey
from gpumond.facts.snapshot import THROTTLE_REASONS, DeviceReading, Sensors, Snapshot
from gpumond.facts.units import MINUTE_SECONDS, list_text, plural
from gpumond.quantities.device_quantities import (
    DEVICE_COUNTERS,
    DEVICE_IDLE,
    DEVICE_UP,
    MEMORY_QUANTITIES,
    SENSOR_QUANTITIES,
)
from gpumond.quantities.quantity import Quantity, Unit, value_text
from gpumond.quantities.scope import (
    DEVICE_LABELS,
    FULL_WINDOW_NOTE,
    IN_WINDOW,
    VERDICT_PLACEHOLDERS,
    VERDICT_QUANTITIES,
    RuleContext,
    ScopeSpec,
    device_placeholders,
    increase_quantity,
    ratio,
    size_text_or_unknown,
    values_without_verdict,
    verdict_values,
)
from gpumond.quantities.window import FILL_RATE_SECONDS, WINDOW_SECONDS, RuleWindow, sum_of_known
from gpumond.tick.claims import fully_listed_devices, may_hold_memory

LOADED_UTILIZATION_RATIO = 0.5
"""Utilization from which a slow PCIe link is a deficit: an idle device slows its link down to save power."""

THERMAL_REASONS = ("sw_thermal_slowdown", "hw_thermal_slowdown")
NEARLY_FULL_RATIO = 0.80


class _DeviceRow(NamedTuple):
    """One device. ``lines`` are its part of the ledger, ``short_processes`` those that recently ran short of memory."""

    device: DeviceReading
    lines: Sequence[LedgerLine]
    cached_bytes: int | None
    stranded_bytes: int | None
    unattributed_bytes: int | None
    used_ratio: float | None
    short_processes: set[ProcessKey]
    xid_increases: Mapping[int, int]
    verdicts: Sequence[Verdict]
    verdict_values: Mapping[str, float | None]
    driver_responds: bool
    window: RuleWindow

    @property
    def window_is_full(self) -> bool:
        """True if a full window has been observed."""
        return self.window.elapsed_seconds >= WINDOW_SECONDS


def device_rows(context: RuleContext) -> Sequence[_DeviceRow]:
    snapshot, window = context.snapshot, context.window
    lines: defaultdict[str, list[LedgerLine]] = defaultdict(list)
    for line in context.ledger.lines:
        lines[line.device_uuid].append(line)
    verdicts_by_device: defaultdict[str, list[Verdict]] = defaultdict(list)
    for (uuid, _), verdicts in context.problem_verdicts.items():
        verdicts_by_device[uuid] += verdicts
    short_processes = _processes_short_of_memory(window, snapshot)
    source = snapshot.source

    def device_row(device: DeviceReading) -> _DeviceRow:
        uuid, is_known = device.uuid, device.used_bytes is not None
        sums = Counter[str]()
        for line in lines[uuid]:
            sums[line.share] += line.used_bytes
        xids = {
            error.xid: window.xid_growth[uuid, error.xid].increase
            for error in snapshot.xids
            if error.device_uuid == uuid
        }
        return _DeviceRow(
            device=device,
            lines=lines[uuid],
            cached_bytes=sums["cached"] if is_known else None,
            stranded_bytes=sums["stranded"] if is_known else None,
            # Without a process list, it is unknown which process holds memory.
            unattributed_bytes=sums["unattributed"] if is_known and device.processes is not None else None,
            used_ratio=ratio(device.used_bytes, device.size_bytes),
            short_processes=short_processes[uuid],
            xid_increases=xids,
            verdicts=verdicts_by_device[uuid],
            verdict_values=verdict_values(verdicts_by_device[uuid], values_without_verdict(device)),
            driver_responds=source.up and source.responsive,
            window=window,
        )

    return tuple(map(device_row, snapshot.devices))


def _processes_short_of_memory(window: RuleWindow, snapshot: Snapshot) -> Mapping[str, set[ProcessKey]]:
    """Return by device the processes that ran out of memory, or needed a retry, within the window.

    Where the driver's list of a device is complete, only processes in it count: they make others' caches waste.
    """
    short_processes: defaultdict[str, set[ProcessKey]] = defaultdict(set)
    fully_listed = fully_listed_devices(snapshot.devices, snapshot.faults, snapshot.private_pid_namespace)
    counts = {device.uuid: device.used_by_process for device in snapshot.devices if device.uuid in fully_listed}
    for (process, _, uuid), track in window.pool_tracks.items():
        if not window.is_short(track):
            continue
        if uuid not in counts or may_hold_memory(counts[uuid], process, True):
            short_processes[uuid].add(process)
    return short_processes


def users_short_of_memory(window: RuleWindow, snapshot: Snapshot) -> dict[str, frozenset[int]]:
    """Return the users whose programs ran short of memory, for each device that is not nearly full.

    There, `reclaimable_under_pressure_ratio` has no other evidence than what these programs state.
    """
    short = _processes_short_of_memory(window, snapshot)
    ratios = {device.uuid: ratio(device.used_bytes, device.size_bytes) for device in snapshot.devices}
    return {
        uuid: frozenset(
            window.workload_by_process[process].uid for process in short[uuid] if process in window.workload_by_process
        )
        for uuid, used in ratios.items()
        if used is None or used < NEARLY_FULL_RATIO
    }


def _unreclaimable_bytes(row: _DeviceRow) -> int | None:
    used = row.device.used_bytes
    return None if used is None else max(0, used - (row.cached_bytes or 0))


def _wasted_bytes(row: _DeviceRow) -> int | None:
    if row.cached_bytes is None or row.used_ratio is None or row.used_ratio >= NEARLY_FULL_RATIO:
        return row.cached_bytes
    if not row.short_processes:
        return 0
    caches = {line.process: line.used_bytes for line in row.lines if line.share == "cached"}
    return max(row.cached_bytes - caches.get(process, 0) for process in row.short_processes)


def _shortage_text(row: _DeviceRow) -> str:
    """Return what makes caches waste, as the end of a sentence."""
    if row.used_ratio is not None and (row.used_ratio >= NEARLY_FULL_RATIO or not row.short_processes):
        return f"is {row.used_ratio:.0%} full"
    names = sorted({line.workload or f"pid {line.pid}" for line in row.lines if line.process in row.short_processes})
    minutes = WINDOW_SECONDS / MINUTE_SECONDS
    return f"had too little room for {list_text(names or ['a program'])} in the last {minutes:.0f} minutes"


def _idle_used_ratio(row: _DeviceRow) -> float | None:
    utilization = row.device.sensors.gpu_utilization_ratio
    return None if utilization is None else row.used_ratio if utilization == 0 else 0.0


def _xids_text(row: _DeviceRow) -> str:
    return ", ".join(f"{xid} ({plural(count, 'time')})" for xid, count in sorted(row.xid_increases.items()) if count)


def _top_process_text(row: _DeviceRow) -> str:
    top = max(row.device.processes or (), key=lambda process: process.used_bytes or 0, default=None)
    return _program_text(row, top.key, top.used_bytes) if top else "unknown"


def _top_cache_text(row: _DeviceRow) -> str:
    cache = max((line for line in row.lines if line.share == "cached"), key=lambda line: line.used_bytes, default=None)
    if cache is None or cache.process is None:
        return "an unknown program"
    return _program_text(row, cache.process, cache.used_bytes)


def _program_text(row: _DeviceRow, process: ProcessKey, used_bytes: int | None) -> str:
    """Return name, pid and size of a program."""
    usage = row.device.processes_by_key.get(process)
    workloads = (line.workload for line in row.lines if (line.pid, line.start_ticks) == process)
    name = next(workloads, "") or (usage and usage.comm) or "unknown program"
    return f"{name} (pid {process.pid}, {size_text_or_unknown(used_bytes)})"


def _sensor(name: str, meaning: str, read: Callable[[Sensors], float | None], **options: Any) -> Quantity[_DeviceRow]:
    return Quantity(name, meaning, lambda row: read(row.device.sensors), **options)


def _throttle(*reasons: str) -> Callable[[Sensors], float | None]:
    def read(sensors: Sensors) -> float | None:
        active = sensors.throttle_reasons
        return None if active is None else float(any(reason in active for reason in reasons))

    return read


def pcie_link_ratio(sensors: Sensors) -> float | None:
    """Return the link's bandwidth over its maximum, where each generation doubles that of a lane."""
    width = ratio(sensors.pcie_width, sensors.pcie_width_max)
    generation, generation_max = sensors.pcie_generation, sensors.pcie_generation_max
    if width is None or generation is None or generation_max is None:
        return None
    return min(1.0, width * 2.0 ** (generation - generation_max))


def _pcie_link_deficit(sensors: Sensors) -> float | None:
    link_ratio, utilization = pcie_link_ratio(sensors), sensors.gpu_utilization_ratio
    if link_ratio is None or utilization is None:
        return None
    return 1.0 - link_ratio if utilization >= LOADED_UTILIZATION_RATIO else 0.0


def _with_increase(sensor: Quantity[DeviceReading]) -> Iterator[Quantity[_DeviceRow]]:
    """Yield the rule value of a sensor and, if it counts events, that of its increase."""
    quantity = sensor.of_part(_device_reading)
    yield quantity
    if sensor.is_counter:
        yield increase_quantity(
            quantity, DEVICE_COUNTERS.index(sensor.name), lambda row: row.window.device_counters.get(row.device.uuid)
        )


def _device_reading(row: _DeviceRow) -> DeviceReading:
    return row.device


SENSOR_RULE_VALUES: tuple[Quantity[_DeviceRow], ...] = tuple(
    chain.from_iterable(map(_with_increase, SENSOR_QUANTITIES))
)
NVLINK_INCREASES = [
    value for value in SENSOR_RULE_VALUES if value.name.startswith("nvlink_") and value.name.endswith("_increase")
]
DERIVED_RULE_VALUES: tuple[Quantity[_DeviceRow], ...] = (
    _sensor(
        "power_limit_ratio",
        "`power_watts` as a fraction of `power_limit_watts`.",
        lambda sensors: ratio(sensors.power_watts, sensors.power_limit_watts),
        may_exceed_one=True,
    ),
    *(
        _sensor(
            f"throttle_{reason}",
            f"1 while the driver gives the `{reason}` reason for reduced clocks.",
            _throttle(reason),
            is_boolean=True,
        )
        for reason in THROTTLE_REASONS
    ),
    _sensor(
        "throttle_thermal",
        f"1 while the clocks are reduced because of the temperature ({' or '.join(THERMAL_REASONS)}).",
        _throttle(*THERMAL_REASONS),
        is_boolean=True,
    ),
    _sensor(
        "bar1_used_ratio",
        "`bar1_used_bytes` as a fraction of `bar1_size_bytes`.",
        lambda sensors: ratio(sensors.bar1_used_bytes, sensors.bar1_size_bytes),
    ),
    _sensor(
        "pcie_link_ratio",
        "Bandwidth of the PCIe link as a fraction of its maximum, computed from lanes and generation. Lower while the "
        "device is idle.",
        pcie_link_ratio,
    ),
    _sensor(
        "pcie_link_deficit_ratio",
        f"1 - `pcie_link_ratio` while `gpu_utilization_ratio` is at least {LOADED_UTILIZATION_RATIO:.0%}, otherwise 0.",
        _pcie_link_deficit,
    ),
    Quantity(
        "nvlink_errors_increase",
        f"errors of all kinds on all NVLinks {IN_WINDOW}; {FULL_WINDOW_NOTE}",
        lambda row: sum_of_known(tuple(value.read(row) for value in NVLINK_INCREASES)),
    ),
)


def _sensor_text(meaning: str, text: Callable[[Sensors], str]) -> tuple[str, Callable[[_DeviceRow], str]]:
    return meaning, lambda row: text(row.device.sensors)


def _value_text(unit: Unit, value: float | None) -> str:
    return "unknown" if value is None else value_text(unit, value)


def _pcie_link_text(generation: int | None, width: int | None) -> str:
    return f"generation {'?' if generation is None else generation} x{'?' if width is None else width}"


SIZE, USED, FREE, RESERVED = (quantity.of_part(_device_reading) for quantity in MEMORY_QUANTITIES)

DEVICE_SCOPE = ScopeSpec(
    rows=device_rows,
    quantities=(
        replace(
            DEVICE_UP.of_part(_device_reading), read=lambda row: float(row.device.up) if row.driver_responds else None
        ),
        USED,
        FREE,
        Quantity("used_ratio", "used bytes as a fraction of the size", lambda row: row.used_ratio),
        Quantity(
            "reclaimable_bytes",
            "bytes that a flush of all programs on the device would release",
            lambda row: row.cached_bytes,
        ),
        Quantity(
            "reclaimable_ratio",
            "reclaimable bytes as a fraction of the size",
            lambda row: ratio(row.cached_bytes, row.device.size_bytes),
        ),
        Quantity(
            "unreclaimable_ratio",
            "used bytes that a flush can't release, as a fraction of the size",
            lambda row: ratio(_unreclaimable_bytes(row), row.device.size_bytes),
        ),
        Quantity(
            "time_to_full_30s_seconds",
            f"time until the memory is full at the growth rate of the last {FILL_RATE_SECONDS:.0f} s; infinite without "
            "growth",
            lambda row: row.window.time_to_full_30s_seconds(row.device.uuid),
        ),
        Quantity(
            "reclaimable_under_pressure_ratio",
            "`reclaimable_ratio` if the device is at least 80% full; otherwise, if a program was short of memory "
            f"{IN_WINDOW}, the part of `reclaimable_ratio` that belongs to other programs; otherwise 0",
            lambda row: ratio(_wasted_bytes(row), row.device.size_bytes),
        ),
        Quantity(
            "stranded_bytes",
            "free memory that allocators keep and a flush can't release",
            lambda row: row.stranded_bytes,
        ),
        Quantity(
            "unattributed_bytes",
            "used memory that belongs to no visible process; unknown if the driver can't list processes",
            lambda row: row.unattributed_bytes,
        ),
        Quantity(
            "unattributed_ratio",
            "unattributed bytes as a fraction of the size",
            lambda row: ratio(row.unattributed_bytes, row.device.size_bytes),
        ),
        Quantity("idle_used_ratio", "`used_ratio` while no kernel runs, 0 while one runs", _idle_used_ratio),
        Quantity(
            "xid_errors_increase",
            f"Xid errors that the driver reported {IN_WINDOW}; {FULL_WINDOW_NOTE}",
            lambda row: float(sum(row.xid_increases.values())) or (0.0 if row.window_is_full else None),
        ),
        SIZE,
        RESERVED,
        Quantity(
            "processes",
            "processes that the driver lists; unknown if the driver can't list processes",
            lambda row: None if row.device.processes is None else float(len(row.device.processes)),
        ),
        DEVICE_IDLE.of_part(_device_reading),
        Quantity(
            "missed_readings",
            "consecutive readings without new values from the device",
            lambda row: float(row.device.missed_readings),
        ),
        *SENSOR_RULE_VALUES,
        *DERIVED_RULE_VALUES,
        *VERDICT_QUANTITIES,
    ),
    label_meanings={**DEVICE_LABELS, "workload": "workload of a program on the device"},
    labels_of=lambda row: (("gpu", str(row.device.index)), ("uuid", row.device.uuid)),
    placeholders={
        **device_placeholders(_device_reading),
        "used": ("memory in use", lambda row: size_text_or_unknown(row.device.used_bytes)),
        "free": ("free memory", lambda row: size_text_or_unknown(row.device.free_bytes)),
        "reclaimable": ("bytes that a flush would release", lambda row: size_text_or_unknown(row.cached_bytes)),
        "stranded": (
            "free memory that allocators keep and a flush can't release",
            lambda row: size_text_or_unknown(row.stranded_bytes),
        ),
        "unattributed": (
            "used memory that belongs to no visible process",
            lambda row: size_text_or_unknown(row.unattributed_bytes),
        ),
        "top_process": ("the largest process: name, pid, size", _top_process_text),
        "top_cache": ("the program with the largest cache: name, pid, size", _top_cache_text),
        "shortage": ("how full the device is, or which programs it had too little room for", _shortage_text),
        "xids": (f"Xid errors {IN_WINDOW}, by number", _xids_text),
        "temperature": _sensor_text(
            "GPU temperature", lambda sensors: _value_text("celsius", sensors.gpu_temperature_celsius)
        ),
        "power": _sensor_text("power draw", lambda sensors: _value_text("watts", sensors.power_watts)),
        "power_limit": _sensor_text("power limit", lambda sensors: _value_text("watts", sensors.power_limit_watts)),
        "throttle_reasons": _sensor_text(
            "reasons for reduced clocks", lambda sensors: ", ".join(sensors.throttle_reasons or ()) or "none known"
        ),
        "pcie_link": _sensor_text(
            "the PCIe link's generation and lanes",
            lambda sensors: _pcie_link_text(sensors.pcie_generation, sensors.pcie_width),
        ),
        "pcie_link_max": _sensor_text(
            "the PCIe link's highest generation and lanes",
            lambda sensors: _pcie_link_text(sensors.pcie_generation_max, sensors.pcie_width_max),
        ),
        **VERDICT_PLACEHOLDERS,
    },
    programs=lambda row: tuple({line.workload: None for line in row.lines if line.workload}),
)
