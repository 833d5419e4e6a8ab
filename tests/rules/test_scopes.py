"""Values and words of the scopes of rules, as they are documented."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpumond.facts.alerts import Rule, RuleScope
from gpumond.facts.engines import NOT_READ, EngineModel, EngineProcess, EngineReading
from gpumond.facts.frame import Verdict
from gpumond.facts.program import Oom, Program
from gpumond.facts.snapshot import MAX_MISSED_READINGS, Snapshot
from gpumond.features.rules.built_in import BUILT_IN
from gpumond.features.rules.settings import LABELS, QUANTITIES
from gpumond.quantities import subjects
from gpumond.quantities.quantity import Unit, value_text
from gpumond.quantities.scope import RuleContext, problem_verdicts
from gpumond.quantities.window import RuleWindow, next_window
from gpumond.tick.ledger import make_ledger
from tests.helpers.agents import GIB
from tests.helpers.values import TickState, advance, make_device, make_pool, make_process, make_report, make_snapshot

ENGINE = EngineReading(
    name="chat",
    kind="vllm",
    up=True,
    models=(EngineModel("qwen"),),
    running=0,
    waiting=2,
    kv_cache_used_ratio=0.04,
    kv_cache_bytes=50 * GIB,
    held_bytes=70 * GIB,
    age_seconds=0.5,
    sleeping=False,
    paused=False,
    idle_seconds=1800.0,
    processes=(EngineProcess(42, 100),),
)
SNAPSHOT = make_snapshot(
    make_device(used_bytes=40 * GIB, processes=(make_process(42, 30 * GIB),)),
    reports=(make_report(42, (make_pool(live=GIB, cached=GIB),)),),
    engines=(ENGINE,),
)
LEAK = Verdict(
    device_uuid="GPU-a",
    pid=42,
    start_ticks=100,
    kind="leak",
    since=0.0,
    evidence=(("slope_bytes_per_second", 5.0),),
    time_to_full_seconds=90.0,
    summary="it grows",
)
CONTEXT = RuleContext(SNAPSHOT, make_ledger(SNAPSHOT), next_window(RuleWindow(), SNAPSHOT), problem_verdicts([LEAK]))


@pytest.mark.parametrize("scope", QUANTITIES)
def test_documented_values_and_words_exist_for_each_row(scope: RuleScope):
    found = subjects(scope, CONTEXT)
    assert found.rows
    assert found.values.keys() == QUANTITIES[scope].keys()
    for row in found.rows:
        known = [value_of(row) for value_of in found.values.values()]
        assert all(value is None or value >= 0 for value in known)
        assert {name for name, _ in found.labels(row)} | {"workload"} == LABELS[scope].keys() | {"workload"}
        assert all(isinstance(text_of(row), str) for text_of in found.texts.values())


@pytest.mark.parametrize(
    ("unit", "text"),
    [
        ("bytes", "5.0 GiB"),
        ("bytes/s", "300.0 GiB/min"),
        ("seconds", "1 h"),
        ("ratio", "50%"),
        ("count", "3"),
        ("celsius", "83 °C"),
        ("hertz", "1980 MHz"),
        ("watts", "699.5 W"),
        ("joules", "7 J"),
    ],
)
def test_value_is_formatted_with_its_unit(unit: Unit, text: str):
    values = {"seconds": 3600.0, "ratio": 0.5, "count": 3.0, "celsius": 83.0, "hertz": 1.98e9, "watts": 699.5}
    assert value_text(unit, (values | {"joules": 7.0}).get(unit, 5.0 * GIB)) == text


@pytest.mark.parametrize(
    ("frameworks", "name"),
    [
        (("torch 2.13.0",), "PYTORCH_ALLOC_CONF"),
        (("cupy 14.2.0", "torch 2.11.0+cu130"), "PYTORCH_ALLOC_CONF"),
        (("torch 3.0",), "PYTORCH_ALLOC_CONF"),
        (("torch 2.9.1",), "PYTORCH_CUDA_ALLOC_CONF"),
        (("torch nightly", "rmm 26.10"), "PYTORCH_CUDA_ALLOC_CONF"),
    ],
)
def test_advice_on_fragmentation_names_the_variable_of_the_programs_pytorch_version(
    frameworks: tuple[str, ...], name: str
):
    rule = next(rule for rule in BUILT_IN if rule.name == "fragmentation")
    report = make_report(42, (make_pool(live=GIB, cached=GIB),), frameworks=frameworks)
    snapshot = make_snapshot(make_device(used_bytes=40 * GIB), reports=(report,))
    found = subjects(
        "pool", RuleContext(snapshot, make_ledger(snapshot), next_window(RuleWindow(), snapshot), problem_verdicts([]))
    )
    words = {**{name: text_of(found.rows[0]) for name, text_of in found.texts.items()}, "value": "", "threshold": ""}
    description = dict(rule.annotations)["description"].format(**words)
    assert description == f"set {name}=expandable_segments:True, then restart the program"


@pytest.mark.parametrize(
    ("stranded", "ends"), [(0, "to see why: gpumond oom show --pid 42"), (8 * GIB, " to expandable_segments:True")]
)
def test_alert_of_an_out_of_memory_error_ends_with_the_advice_that_applies(stranded: int, ends: str):
    rule = next(rule for rule in BUILT_IN if rule.name == "out-of-memory")
    report = make_report(42, (make_pool(live=GIB, stranded=stranded),))
    snapshot = make_snapshot(make_device(used_bytes=40 * GIB), reports=(report,))
    found = subjects("pool", advanced(snapshot))
    words = {**{name: text_of(found.rows[0]) for name, text_of in found.texts.items()}, "value": "", "threshold": ""}
    assert dict(rule.annotations)["description"].format(**words).endswith(ends)


@pytest.mark.parametrize(
    ("seen", "ago", "reported", "text"),
    [
        ("scope", 60.0, 0.2, "ran out of memory and kept running"),
        ("scope", 1.0, 0.2, "ran out of memory"),
        ("scope", 60.0, 59.0, "ran out of memory"),
        ("unhandled", 60.0, 0.2, "ran out of memory"),
    ],
)
def test_out_of_memory_text_says_that_the_program_kept_running(seen: Any, ago: float, reported: float, text: str):
    oom = Oom(number=1, at=1_000_000.0 - ago, seen=seen)
    report = make_report(42, (make_pool(live=GIB),), program=Program(ooms=(oom,)), age_seconds=reported)
    snapshot = make_snapshot(make_device(used_bytes=40 * GIB), reports=(report,))
    found = subjects("pool", advanced(snapshot))
    assert found.texts["oom"](found.rows[0]) == text


def test_verdict_is_a_value_of_its_process_and_its_device():
    for scope, pids in (("process", ("42", "")), ("device", ("",))):
        found = subjects(scope, CONTEXT)  # type: ignore[arg-type]
        leaks = {
            dict(found.labels(row)).get("pid", ""): found.values["leak_bytes_per_second"](row) for row in found.rows
        }
        assert leaks == dict(zip(pids, (5.0, 0.0) if scope == "process" else (5.0,), strict=True))


def advanced(*ticks: Snapshot) -> RuleContext:
    recent = RuleWindow()
    for snapshot in ticks:
        recent = next_window(recent, snapshot)
    return RuleContext(ticks[-1], make_ledger(ticks[-1]), recent)


def test_agent_of_an_unlisted_process_does_not_make_cache_waste():
    device = make_device(used_bytes=40 * GIB, processes=(make_process(42, 30 * GIB), make_process(43, 9 * GIB)))
    own = make_report(42, (make_pool(live=GIB, cached=20 * GIB, ooms=0),))

    def wasted(pid: int) -> float | None:
        ticks = [
            make_snapshot(device, elapsed_seconds=at, reports=(own, make_report(pid, (make_pool(ooms=count),), uid=66)))
            for at, count in ((1.0, 0), (2.0, 1))
        ]
        found = subjects("device", advanced(*ticks))
        return found.values["reclaimable_under_pressure_ratio"](found.rows[0])

    assert wasted(43) == 20 / 80
    assert wasted(66) == 0


def test_workloads_of_two_users_are_separate_with_any_names():
    own = make_report(42, (make_pool(live=GIB, cached=GIB),), uid=1000)
    other = make_report(66, (make_pool(live=50 * GIB),), uid=66)
    rules = (
        Rule(name="above", scope="workload", value="live_bytes", above=2 * GIB, match=(("uid", "1000"),)),
        Rule(name="below", scope="workload", value="live_bytes", below=2 * GIB),
    )
    first = advance(TickState(), rules, make_snapshot(make_device(), reports=(own, other)))
    assert [dict(alert.labels)["uid"] for alert in first.frame.alerts] == ["1000"]
    silent = make_device(processes=(make_process(66),))
    second = advance(first.memory, rules, make_snapshot(silent, elapsed_seconds=2.0, reports=(own,)))
    assert [alert.value for alert in second.frame.alerts] == [float(GIB)]
    third = advance(second.memory, rules, make_snapshot(silent, elapsed_seconds=3.0))
    assert third.frame.alerts == ()


def values_of(engine: EngineReading, **device: Any) -> dict[str, float | None]:
    """Values of an engine whose process 42 holds 30 GiB."""
    snapshot = make_snapshot(make_device(processes=(make_process(42, 30 * GIB),), **device), engines=(engine,))
    found = subjects("engine", advanced(snapshot))
    (row,) = found.rows
    return {name: value_of(row) for name, value_of in found.values.items()}


def test_values_of_an_engine():
    assert values_of(ENGINE) == {
        "up": 1.0,
        "used_bytes": 30 * GIB,
        "idle_seconds": 1800.0,
        "running_requests": 0,
        "waiting_requests": 2,
        "kv_cache_used_ratio": 0.04,
        "kv_cache_idle_used_bytes": 30 * GIB,
        "kv_cache_bytes": 50 * GIB,
        "held_bytes": 70 * GIB,
        "models": 1.0,
        "state_age_seconds": 0.5,
        "sleeping": 0.0,
        "paused": 0.0,
        "out_of_service_seconds": 0.0,
    }
    assert values_of(replace(ENGINE, out_of_service_seconds=12.0))["out_of_service_seconds"] == 12.0
    assert values_of(replace(ENGINE, kv_cache_used_ratio=0.5))["kv_cache_idle_used_bytes"] == 0.0


def test_values_of_an_engine_that_is_not_read_are_unknown():
    silent = EngineReading(name="chat", kind="vllm", up=False, problem="nothing is listening")
    assert {name for name, value in values_of(silent).items() if value is not None} == {"up", "out_of_service_seconds"}
    assert values_of(silent)["up"] == 0.0
    assert values_of(replace(silent, problem=NOT_READ))["up"] is None


def test_memory_of_an_engine_without_a_process_is_unknown_unless_it_states_none():
    assert values_of(replace(ENGINE, processes=()))["used_bytes"] is None
    assert values_of(replace(ENGINE, processes=(), held_bytes=0))["used_bytes"] == 0
    assert values_of(replace(ENGINE, processes=(), held_bytes=0, processes_problem="hidden"))["used_bytes"] is None
    assert values_of(ENGINE, missed_readings=MAX_MISSED_READINGS)["used_bytes"] is None


def test_alert_on_the_unused_kv_cache_of_an_engine():
    summary = "{engine} ({kind}) holds {used} while {kv_cache} of its KV cache is in use"
    rule = Rule(
        name="unused-kv-cache",
        scope="engine",
        value="kv_cache_idle_used_bytes",
        above=20.0 * GIB,
        for_seconds=1800.0,
        match=(("kind", "vllm"),),
        annotations=(("summary", summary),),
    )

    def ticked(memory: TickState, elapsed: float, *engines: EngineReading) -> Any:
        device = make_device(processes=(make_process(42, 30 * GIB),))
        return advance(memory, [rule], make_snapshot(device, elapsed_seconds=elapsed, engines=engines))

    first = ticked(TickState(), 1.0, ENGINE)
    assert [alert.phase for alert in first.frame.alerts] == ["pending"]
    second = ticked(first.memory, 1801.0, ENGINE)
    (alert,) = second.raised
    assert dict(alert.labels) == {"alertname": "unused-kv-cache", "engine": "chat", "kind": "vllm"}
    assert dict(alert.annotations)["summary"] == "chat (vllm) holds 30.0 GiB while 4% of its KV cache is in use"
    silent = ticked(second.memory, 1802.0, EngineReading(name="chat", kind="vllm", up=False, problem="timeout"))
    assert [alert.phase for alert in silent.frame.alerts] == ["firing"]
    undeclared = ticked(silent.memory, 1803.0)
    assert dict(undeclared.resolved[0].annotations)["summary"].startswith("engine chat (vllm) is no longer configured;")
