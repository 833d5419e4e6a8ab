"""Rule actions with the step ``engine``: which serving engines are flushed, and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from gpumond.facts.alerts import Action, Rule
from gpumond.facts.engines import EngineProcess, EngineReading
from gpumond.facts.frame import Alert
from gpumond.facts.pools import Receipt
from gpumond.facts.program import ProcessKey
from gpumond.facts.snapshot import AgentReport
from gpumond.features.alerts.action_decisions import decide_actions, states_after_flush
from gpumond.features.rules.settings import RuleConfig, rule_body
from tests.helpers.agents import GIB
from tests.helpers.values import make_device, make_pool, make_process, make_report, make_snapshot

ENGINE = EngineReading(
    name="chat",
    kind="ollama",
    up=True,
    idle_seconds=900.0,
    processes=(EngineProcess(20, 100),),
    uid=1000,
    methods=("unload",),
)
ACTION = Action(steps=("engine",), only_idle_for_seconds=900.0, cooldown_seconds=100.0)
RULE = Rule(name="idle", scope="device", value="used_bytes", above=1.0, action=ACTION)
ALERT = Alert(
    rule="idle",
    phase="firing",
    labels=(("alertname", "idle"), ("uuid", "GPU-a")),
    annotations=(),
    value=2.0,
    active_at=1.0,
    fired_at=2.0,
)


def flushed(
    engine: EngineReading = ENGINE,
    labels: Sequence[tuple[str, str]] = (),
    action: Action = ACTION,
    reports: Sequence[AgentReport] = (),
    rule: Rule = RULE,
    **fields: Any,
) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
    """Names of the engines and pids of the programs that are flushed."""
    device = make_device(processes=(make_process(20), make_process(10)))
    snapshot = make_snapshot(device, engines=(engine,))
    alert = replace(ALERT, labels=(*ALERT.labels[:1], *(labels or ALERT.labels[1:])), **fields)
    orders, _ = decide_actions([replace(rule, action=action)], [alert], reports, {}, 0.0, snapshot.engine_devices)
    return [(order.engines, order.pids) for order in orders]


def test_engine_is_flushed_when_it_was_idle_for_long_enough():
    assert flushed() == [(("chat",), ())]
    assert flushed(replace(ENGINE, idle_seconds=899.0)) == []


@pytest.mark.parametrize(
    "fields",
    [{"idle_seconds": None}, {"methods": ()}, {"processes": ()}, {"sleeping": True}, {"uid": None}],
    ids=lambda fields: next(iter(fields)),
)
def test_engine_is_left_alone(fields: dict[str, Any]):
    assert flushed(replace(ENGINE, **fields)) == []


@pytest.mark.parametrize(
    ("labels", "matches"),
    [
        ([("uuid", "GPU-b")], False),
        ([("uuid", "GPU-a"), ("pid", "20")], True),
        ([("uuid", "GPU-a"), ("pid", "20"), ("workload", "the name that its program states")], True),
        ([("uuid", "GPU-a"), ("pid", "10")], False),
        ([("workload", "chat"), ("uid", "1000")], True),
        ([("workload", "train")], False),
        ([("workload", "chat"), ("uid", "1001")], False),
    ],
)
def test_engine_of_the_alerts_subject_is_flushed(labels: list[tuple[str, str]], matches: bool):
    assert bool(flushed(labels=labels)) == matches


def test_alert_of_another_process_with_this_pid_flushes_nothing():
    labels = [("uuid", "GPU-a"), ("pid", "20")]
    assert flushed(labels=labels, pid=20, start_ticks=100) != []
    assert flushed(labels=labels, pid=20, start_ticks=7) == []


def test_action_limits_the_names_of_engines():
    assert flushed(action=replace(ACTION, workloads=("train*",))) == []


def test_programs_are_flushed_only_if_the_action_has_a_step_for_them():
    program = make_report(10, pools=(make_pool(cached=GIB),))
    assert flushed(reports=[program]) == [(("chat",), ())]
    assert flushed(reports=[program], action=replace(ACTION, steps=("cache", "engine"))) == [(("chat",), (10,))]
    assert flushed(reports=[program], action=replace(ACTION, steps=("cache",))) == [((), (10,))]


@pytest.mark.parametrize(("name", "flushes"), [("chat", [(("chat",), (20,))]), ("other", [])])
def test_alert_on_an_engine_flushes_this_engine_and_the_programs_in_it(name: str, flushes: list[Any]):
    programs = [make_report(pid, pools=(make_pool(cached=GIB),)) for pid in (10, 20)]
    rule = replace(RULE, scope="engine", value="idle_seconds")
    labels = [("engine", name), ("kind", "ollama")]
    steps = replace(ACTION, steps=("cache", "engine"))
    assert flushed(labels=labels, action=steps, reports=programs, rule=rule) == flushes


def test_flush_without_effect_doubles_the_wait():
    snapshot = make_snapshot(make_device(processes=(make_process(20),)), engines=(ENGINE,))

    def orders(tracks: Any, elapsed: float) -> Any:
        return decide_actions([RULE], [ALERT], (), tracks, elapsed, snapshot.engine_devices)

    (order,), tracks = orders({}, 0.0)
    assert orders(tracks, 50.0)[0] == []  # under way
    receipt = Receipt(
        pid=20,
        workload="chat",
        device_uuid="GPU-a",
        allocator="ollama",
        outcome="refused",
        reason="1 requests run",
        expected=None,
        released_bytes=0,
        driver_released_bytes=0,
        before=None,
        after=None,
        steps=(),
        raced=False,
        requested_by="rule:idle",
        started_at=0.0,
        duration_seconds=1.0,
    )
    tracks = states_after_flush(tracks, order, [receipt])
    assert [bool(orders(tracks, at)[0]) for at in (150.0, 250.0)] == [False, True]
    assert ProcessKey(20, 100) == ENGINE.processes[0].key


def test_idle_time_is_written_and_read():
    text = {"flush": {"steps": ["engine"], "only_idle_for": "15m"}}
    rule = RuleConfig(name="idle", scope="device", value="used_bytes", above=1, action=text).rule()  # type: ignore[arg-type]
    assert rule.action
    assert rule.action.only_idle_for_seconds == 900.0
    assert RuleConfig.model_validate(rule_body(rule)).rule() == rule


def test_idle_time_requires_the_step_engine():
    with pytest.raises(ValueError, match="add the step engine"):
        RuleConfig.model_validate(
            {
                "name": "idle",
                "scope": "device",
                "value": "used_bytes",
                "above": 1,
                "action": {"flush": {"only_idle_for": "15m"}},
            }
        )
