"""Each number of a snapshot is a value of rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import pytest

from gpumond.facts.alerts import RuleScope
from gpumond.facts.engines import EngineReading
from gpumond.facts.pools import HostPool, PoolUsage
from gpumond.facts.program import TICKS_PER_SECOND, Program, StepUsage
from gpumond.facts.snapshot import (
    THROTTLE_REASONS,
    AgentReport,
    DeviceReading,
    ExcessClaim,
    ProcessUsage,
    Sensors,
    Snapshot,
)
from gpumond.features.rules.settings import QUANTITIES, UNITS
from gpumond.quantities import subjects
from gpumond.quantities.device_quantities import DEVICE_COUNTERS
from gpumond.quantities.program_quantities import POOL_COUNTERS, PROGRAM_COUNTERS
from gpumond.quantities.scope import RuleContext
from gpumond.quantities.window import WINDOW_SECONDS, RuleWindow, next_window
from gpumond.tick.ledger import make_ledger
from tests.helpers.agents import GIB
from tests.helpers.values import make_device, make_pool, make_process, make_report, make_snapshot

NO_NUMBERS = {"compute_mode", "virtualization_mode", "addressing_mode", "numa_node", "throttle_reasons"}
"""Sensors that are names; each throttle reason is a value."""

IDENTITY = {"index", "gpu_instance_id", "pid", "pinned_uid", "rank", "start_ticks", "uid", "world_size"}
OTHER_NAMES = {
    DeviceReading: {},
    StepUsage: {
        "retained_bytes": "step_retained_bytes",
        "live_bytes": "step_live_bytes",
        "stranded_bytes": "step_stranded_bytes",
        "retries": "step_retries",
    },
    Program: {},
    AgentReport: {"age_seconds": "report_age_seconds"},
    HostPool: {"live_bytes": "host_live_bytes", "held_bytes": "host_held_bytes"},
    ProcessUsage: {},
    PoolUsage: {},
    EngineReading: {"running": "running_requests", "waiting": "waiting_requests", "age_seconds": "state_age_seconds"},
}
SUSPENSION = {"suspended", "suspendable", "can_suspend", "may_suspend", "resume_signals"}
"""A suspended process isn't a subject, and its alerts end; the others are requests of the program."""
SETTINGS = {
    "unified",
    "distributed",
    "uses_device",
    "held_known",
    "managed",
    "allows_limit",
    "partition_bytes",
    *SUSPENSION,
}
"""Facts that do not change while a subject exists."""

NUMBERS = {"int", "float", "bool", "int | None", "float | None", "bool | None"}
SCOPES_OF: tuple[tuple[type, RuleScope], ...] = (
    (DeviceReading, "device"),
    (ProcessUsage, "process"),
    (AgentReport, "process"),
    (Program, "process"),
    (StepUsage, "process"),
    (HostPool, "process"),
    (PoolUsage, "pool"),
    (EngineReading, "engine"),
)


def sensors_of(**values: Any) -> Sensors:
    return Sensors(**values)


def context(*ticks: Snapshot) -> RuleContext:
    recent = RuleWindow()
    for snapshot in ticks:
        recent = next_window(recent, snapshot)
    return RuleContext(ticks[-1], make_ledger(ticks[-1]), recent)


def values(scope: RuleScope, *ticks: Snapshot) -> dict[str, float | None]:
    """Values of the first subject of a scope after the snapshots."""
    found = subjects(scope, context(*ticks))
    return {name: value_of(found.rows[0]) for name, value_of in found.values.items()}


def device_values(*sensors: Sensors, seconds: float = 1.0) -> dict[str, float | None]:
    """Values of a device with these sensors, one after the other."""
    return values(
        "device",
        *(
            make_snapshot(make_device(sensors=each), elapsed_seconds=number * seconds)
            for number, each in enumerate(sensors)
        ),
    )


@pytest.mark.parametrize("field", [each.name for each in fields(Sensors) if each.name not in NO_NUMBERS])
def test_sensor_is_a_value_and_unknown_without_a_reading(field: str):
    kind = next(str(each.type) for each in fields(Sensors) if each.name == field)
    for number in (0, 1):
        own = bool(number) if kind.startswith("bool") else number
        assert device_values(sensors_of(**{field: own}))[field] == float(number)
    assert device_values(Sensors())[field] is None


@pytest.mark.parametrize(("model", "scope"), SCOPES_OF, ids=lambda each: str(getattr(each, "__name__", each)))
def test_number_of_a_snapshot_is_a_value(model: type, scope: RuleScope):
    numbers = {each.name for each in fields(model) if str(each.type) in NUMBERS} - IDENTITY - SETTINGS
    names: Mapping[str, str] = OTHER_NAMES[model]
    up = {"up"} if model is DeviceReading else set()
    assert {names.get(name, name) for name in numbers} - up <= QUANTITIES[scope].keys()


@pytest.mark.parametrize("reason", THROTTLE_REASONS)
def test_throttle_reason_is_a_value(reason: str):
    name = f"throttle_{reason}"
    assert device_values(Sensors(throttle_reasons=(reason,)))[name] == 1
    assert device_values(Sensors(throttle_reasons=()))[name] == 0
    assert device_values(Sensors())[name] is None


@pytest.mark.parametrize(
    ("reasons", "value"),
    [(("sw_thermal_slowdown",), 1), (("hw_thermal_slowdown", "gpu_idle"), 1), (("sw_power_cap",), 0), (None, None)],
)
def test_thermal_throttling_has_two_reasons(reasons: tuple[str, ...] | None, value: float | None):
    assert device_values(Sensors(throttle_reasons=reasons))["throttle_thermal"] == value


@pytest.mark.parametrize("counter", DEVICE_COUNTERS)
def test_counter_of_a_device_has_an_increase(counter: str):
    name = "energy_increase_joules" if counter == "energy_joules" else f"{counter}_increase"
    before, after = sensors_of(**{counter: 5}), sensors_of(**{counter: 8})
    assert device_values(before)[name] is None
    assert device_values(before, after)[name] == 3
    assert device_values(before, before, seconds=WINDOW_SECONDS / 20)[name] is None
    assert device_values(*[before] * 22, seconds=WINDOW_SECONDS / 20)[name] == 0
    assert device_values(before, Sensors())[name] is None


def test_every_counter_has_an_increase():
    for scope, counters in (("pool", POOL_COUNTERS), ("process", PROGRAM_COUNTERS)):
        assert {f"{counter}_increase" for counter in counters} <= QUANTITIES[scope].keys()  # type: ignore[index]


def test_nvlink_errors_are_the_sum_of_all_kinds():
    before = Sensors(nvlink_crc_flit_errors=1, nvlink_replay_errors=2)
    after = Sensors(nvlink_crc_flit_errors=4, nvlink_replay_errors=9)
    assert device_values(before, after)["nvlink_errors_increase"] == 10
    assert device_values(Sensors(), Sensors())["nvlink_errors_increase"] is None


LINK = Sensors(pcie_generation=5, pcie_generation_max=5, pcie_width=16, pcie_width_max=16, gpu_utilization_ratio=0.9)


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ({}, (1, 0)),
        ({"pcie_width": 8}, (0.5, 0.5)),
        ({"pcie_generation": 3}, (0.25, 0.75)),
        ({"pcie_generation": 4, "pcie_width": 8}, (0.25, 0.75)),
        ({"pcie_generation": 4, "gpu_utilization_ratio": 0.1}, (0.5, 0)),
        ({"pcie_generation": 4, "gpu_utilization_ratio": None}, (0.5, None)),
        ({"pcie_width_max": None}, (None, None)),
        ({"pcie_generation_max": None}, (None, None)),
        ({"pcie_generation": 6}, (1, 0)),
    ],
)
def test_pcie_link_has_a_deficit_only_under_load(change: dict[str, Any], value: tuple[float | None, float | None]):
    found = device_values(replace(LINK, **change))
    assert (found["pcie_link_ratio"], found["pcie_link_deficit_ratio"]) == value


def test_ratios_of_a_device():
    known = device_values(
        Sensors(power_watts=350.0, power_limit_watts=700.0, bar1_used_bytes=GIB, bar1_size_bytes=4 * GIB)
    )
    assert (known["power_limit_ratio"], known["bar1_used_ratio"]) == (0.5, 0.25)
    unknown = device_values(Sensors(power_watts=350.0, bar1_used_bytes=GIB))
    assert (unknown["power_limit_ratio"], unknown["bar1_used_ratio"]) == (None, None)


STEP = StepUsage(
    steps=40, steps_per_second=2.5, retained_bytes=512.0, live_bytes=3 * GIB, stranded_bytes=GIB, retries=1
)
POOLS = (
    make_pool(live=2 * GIB, cached=GIB, stranded=3, unmapped_bytes=7, device_allocations=10, allocator="rmm"),
    make_pool(live=GIB, inside="rmm", allocator="cupy"),
    make_pool(live=5, unmapped_bytes=1, allocator="torch"),
    make_pool("GPU-b", live=99),
)
REPORT = make_report(
    42,
    POOLS,
    age_seconds=0.5,
    program=Program(step=STEP, oom_retries=4, oom_recovered=3, refusals=2),
    host_pools=(HostPool("torch", 100, 200), HostPool("cupy", 1, 2)),
)
PROCESS = replace(make_process(42, 10 * GIB), utilization_ratio=0.25, idle_seconds=60.0, orphaned=True)


def process_snapshot(report: AgentReport | None = REPORT, **fields: Any) -> Snapshot:
    return make_snapshot(
        make_device(used_bytes=10 * GIB, processes=(PROCESS,)), reports=() if report is None else (report,), **fields
    )


def test_values_of_a_process():
    excess = ExcessClaim(
        pid=42, start_ticks=100, device_uuid="GPU-a", workload="train", claimed_bytes=9, limit_bytes=5, ticks=1
    )
    found = values("process", process_snapshot(uptime_seconds=3601.0, excesses=(excess,)))
    assert (
        found
        | {
            "utilization_ratio": 0.25,
            "idle_seconds": 60,
            "age_seconds": 3601 - 100 / TICKS_PER_SECOND,
            "orphaned": 1,
            "report_excess_bytes": 4,
            "report_age_seconds": 0.5,
            "live_bytes": 2 * GIB + 5,
            "held_bytes": 3 * GIB + 3 + 5,
            "reclaimable_bytes": GIB,
            "stranded_bytes": 3,
            "unmapped_bytes": 8,
            "host_live_bytes": 101,
            "host_held_bytes": 202,
            "steps": 40,
            "steps_per_second": 2.5,
            "step_retained_bytes": 512,
            "step_live_bytes": 3 * GIB,
            "step_stranded_bytes": GIB,
            "step_retries": 1,
            "oom_retries": 4,
            "oom_recovered": 3,
            "refusals": 2,
        }
        == found
    )


def test_values_from_an_agent_are_unknown_without_one():
    driver = {"used_bytes", "used_ratio", "utilization_ratio", "idle_seconds", "orphaned"}
    driver |= {"soft_limit_excess_bytes", "reserve_shortage_bytes"}
    found = values("process", process_snapshot(None))
    known = {name for name, value in found.items() if value is not None}
    verdicts = {name for name, unit in UNITS["process"].items() if unit == "boolean"} - {"orphaned", "agent_gone"}
    assert known - verdicts - {"leak_bytes_per_second", "time_to_full_seconds"} == driver


def test_values_that_an_agent_does_not_report_are_unknown():
    found = values("process", process_snapshot(make_report(42)))
    unknown = {name for name, value in found.items() if value is None}
    assert unknown >= {"live_bytes", "unmapped_bytes", "host_live_bytes", "steps", "steps_per_second", "age_seconds"}


@pytest.mark.parametrize("name", PROGRAM_COUNTERS)
def test_counter_of_a_program_has_an_increase(name: str):
    def program(count: int) -> Program:
        if name in ("steps", "step_retries"):
            return Program(step=replace(STEP, **{name.removeprefix("step_"): count}))
        return replace(Program(), **{name: count})

    ticks = [
        process_snapshot(replace(REPORT, program=program(count)), elapsed_seconds=float(number))
        for number, count in enumerate((5, 9))
    ]
    assert values("process", ticks[0])[f"{name}_increase"] is None
    assert values("process", *ticks)[f"{name}_increase"] == 4


@pytest.mark.parametrize("name", POOL_COUNTERS)
def test_counter_of_a_pool_has_an_increase(name: str):
    def tick(second: float, count: int) -> Snapshot:
        pool = make_pool(**{name: count})  # type: ignore[arg-type]
        return make_snapshot(make_device(), reports=(make_report(pools=(pool,)),), elapsed_seconds=second)

    found = values("pool", tick(0, 5), tick(1, 6), tick(40, 9))
    assert (found[name], found[f"{name}_increase"]) == (9, 4)


def test_values_of_the_daemon_and_of_a_workload():
    snapshot = make_snapshot(make_device(), reports=(make_report(1), make_report(2)))
    found = values("daemon", snapshot)
    assert (found["devices"], found["engines"], found["faults"]) == (1, 0, 0)
    assert values("workload", snapshot)["programs"] == 2
