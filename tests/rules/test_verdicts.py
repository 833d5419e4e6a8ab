"""Verdicts as the values of rules, and the rule on leaks."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from gpumond.facts.alerts import Rule
from gpumond.facts.frame import Verdict
from gpumond.facts.pools import PoolUsage
from gpumond.facts.snapshot import DeviceReading, Snapshot
from gpumond.features.rules.built_in import BUILT_IN
from tests.helpers.agents import GIB
from tests.helpers.values import (
    Advanced,
    TickState,
    evaluate,
    make_device,
    make_fault,
    make_pool,
    make_process,
    make_report,
    make_snapshot,
    make_suspended,
)

MIB = 1024**2
LEAK = Verdict(
    device_uuid="GPU-a",
    pid=10,
    start_ticks=100,
    kind="leak",
    since=1.0,
    evidence=(("slope_bytes_per_second", 2.0 * MIB),),
    time_to_full_seconds=3840.0,
    summary="train (pid 10) is leaking about 120 MiB/min on GPU 0; GPU 0 will be full in 1 h 4 min",
)
RULES = tuple(rule for rule in BUILT_IN if rule.name == "leak")
DEVICE = make_device(used_bytes=40 * GIB, processes=(make_process(10, 30 * GIB), make_process(11, 10 * GIB)))


def always_firing(scope: str, value: str, threshold: float = -1.0) -> Rule:
    """Create a rule that always fires, so its alerts have the values."""
    below = value == "time_to_full_seconds"
    return Rule(
        name="watch", scope=scope, value=value, above=None if below else threshold, below=inf if below else None
    )  # type: ignore[arg-type]


def values_of_alerts(*verdicts: Verdict, rule: Rule, device: DeviceReading = DEVICE) -> dict[str, float]:
    tick = evaluate(TickState(), [rule], make_snapshot(device), verdicts)
    return {dict(alert.labels).get("pid", "device"): alert.value for alert in tick.frame.alerts}


@pytest.mark.parametrize(
    ("scope", "value", "values"),
    [
        ("process", "leak", {"10": 1, "11": 0, "": 0}),
        ("process", "leak_bytes_per_second", {"10": 2 * MIB, "11": 0, "": 0}),
        ("process", "time_to_full_seconds", {"10": 3840}),
        ("process", "crash_loop", {"10": 0, "11": 0, "": 1}),
        ("device", "leak", {"device": 1}),
        ("device", "crash_loop", {"device": 1}),
        ("device", "leak_bytes_per_second", {"device": 2 * MIB}),
        ("device", "time_to_full_seconds", {"device": 600}),
        ("device", "pressure", {"device": 1}),
        ("device", "fragmentation", {"device": 0}),
    ],
)
def test_verdict_is_a_value_of_its_process_and_its_device(scope: str, value: str, values: dict[str, float]):
    on_device = (
        Verdict(device_uuid="GPU-a", pid=None, start_ticks=None, kind="crash-loop", since=1.0),
        Verdict(
            device_uuid="GPU-a",
            pid=11,
            start_ticks=100,
            kind="pressure",
            since=1.0,
            evidence=(),
            time_to_full_seconds=600.0,
        ),
    )
    if value == "time_to_full_seconds" and scope == "process":
        on_device = on_device[:1]
    elsewhere = Verdict(device_uuid="GPU-b", pid=10, start_ticks=100, kind="fragmentation", since=1.0)
    assert values_of_alerts(LEAK, *on_device, elsewhere, rule=always_firing(scope, value)) == values


def test_unread_device_has_no_verdict_value():
    lost = make_device(missed_readings=3, size_bytes=None, used_bytes=None, processes=None)
    assert values_of_alerts(rule=always_firing("device", "leak"), device=lost) == {}
    assert values_of_alerts(rule=always_firing("process", "leak"), device=lost) == {}


def run_ticks(*ticks: tuple[Snapshot, tuple[Verdict, ...]]) -> list[Advanced]:
    memory, results = TickState(), []
    for second, (snapshot, verdicts) in enumerate(ticks):
        at = 1000.0 * second
        moved = Snapshot(
            seq=second + 1,
            taken_at=at,
            elapsed_seconds=at,
            source=snapshot.source,
            devices=snapshot.devices,
            reports=snapshot.reports,
        )
        results.append(evaluate(memory, RULES, moved, verdicts))
        memory = results[-1].memory
    return results


def test_leak_alert_has_the_details_of_its_verdict_and_ends_with_it():
    calm = make_snapshot(DEVICE)
    well = Verdict(
        device_uuid="GPU-a",
        pid=10,
        start_ticks=100,
        kind="churn",
        since=1.0,
        evidence=(),
        time_to_full_seconds=None,
        summary="train goes up and down",
    )
    ticks = run_ticks((calm, (well,)), (calm, (well, LEAK)), (calm, ()), (calm, ()))
    assert [len(tick.raised) for tick in ticks] == [0, 1, 0, 0]
    assert [len(tick.resolved) for tick in ticks] == [0, 0, 0, 1]
    (alert,) = ticks[1].raised
    assert dict(alert.labels) == {
        "alertname": "leak",
        "gpu": "0",
        "pid": "10",
        "uuid": "GPU-a",
        "severity": "warning",
    }
    assert dict(alert.annotations)["summary"] == LEAK.summary
    assert dict(alert.annotations)["description"].startswith("find out what retains the memory: gpumond why --pid")


def test_alert_on_a_process_has_the_workload_of_its_start():
    """Silences and routes name a workload, which outlives a restart; the label stays when the agent comes or goes."""
    pools = (make_pool("GPU-a", live=GIB, cached=0),)
    report = make_report(10, pools, workload="train", start_ticks=100)
    with_agent, without = make_snapshot(DEVICE, reports=(report,)), make_snapshot(DEVICE)
    for snapshots, workload in (((with_agent, without), "train"), ((without, with_agent), None)):
        ticks = run_ticks(*((each, (LEAK,)) for each in snapshots))
        assert [[alert.rule for alert in tick.raised] for tick in ticks] == [["leak"], []]
        assert {dict(alert.labels).get("workload") for tick in ticks for alert in tick.frame.alerts} == {workload}


def test_alert_on_a_process_has_the_labels_of_its_owner_at_its_start():
    """Silences and routes name a user, a pod or a job. An unknown part is absent."""
    usage = make_process(10, 30 * GIB)
    known = replace(usage, user="ada", pod_namespace="team", pod_name="train-0", slurm_job="4711")
    snapshots = [make_snapshot(make_device(processes=(each,))) for each in (known, usage)]
    owner = {"user": "ada", "pod_namespace": "team", "pod_name": "train-0", "slurm_job": "4711"}
    for order, expected in ((snapshots, owner), (snapshots[::-1], {})):
        ticks = run_ticks(*((each, (LEAK,)) for each in order))
        assert [[alert.rule for alert in tick.raised] for tick in ticks] == [["leak"], []]
        for tick in ticks:
            (alert,) = tick.frame.alerts
            assert {name: text for name, text in alert.labels if name in owner} == expected


def test_leak_without_a_process_fires():
    (alert,) = run_ticks(
        (
            make_snapshot(make_device(processes=None)),
            (Verdict(device_uuid="GPU-a", pid=None, start_ticks=None, kind="leak", since=1.0),),
        )
    )[0].raised
    assert dict(alert.labels)["pid"] == ""


def test_leak_alert_continues_without_the_agent_and_ends_with_the_process():
    with_agent = make_snapshot(DEVICE, reports=(make_report(10, (make_pool(live=GIB),)),))
    without, gone = make_snapshot(DEVICE), make_snapshot(make_device())
    ticks = run_ticks((with_agent, (LEAK,)), (without, ()), (without, ()), (gone, ()), (gone, ()))
    assert [len(tick.frame.alerts) for tick in ticks] == [1, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("pool", "fields", "remedy"),
    [
        (make_pool(live=29 * GIB), {"can_suspend": True}, "to release 30.0 GiB: gpumond suspend --pid 10"),
        (
            make_pool(live=9 * GIB, cached=20 * GIB),
            {"can_suspend": True},
            "to release 20.0 GiB: gpumond flush --pid 10",
        ),
        (make_pool(live=28 * GIB, cached=GIB), {}, "to release 1.0 GiB: gpumond flush --pid 10"),
        (make_pool(live=29 * GIB), {}, "a flush of this program would release nothing"),
        (make_pool(cached=29 * GIB), {"flush_policy": "never"}, "a flush of this program would release nothing"),
    ],
)
def test_alert_on_an_idle_holder_advises_what_releases_its_memory(pool: PoolUsage, fields: dict[str, Any], remedy: str):
    rules = [rule for rule in BUILT_IN if rule.name == "idle-holder"]
    snapshot = make_snapshot(DEVICE, reports=(make_report(10, (pool,), **fields),))
    idle = replace(LEAK, kind="idle-holder", time_to_full_seconds=None, summary="train (pid 10) is idle")
    (alert,) = evaluate(TickState(), rules, snapshot, (idle,)).frame.alerts
    assert dict(alert.annotations)["description"] == f"{remedy}; if you don't need the program, stop it"


KEEPING = (
    Rule(
        name="hog",
        scope="process",
        value="used_bytes",
        above=GIB,
        keep_firing_for_seconds=300,
        annotations=(("summary", "a hog"),),
    ),
    Rule(name="pool", scope="pool", value="held_bytes", above=GIB, keep_firing_for_seconds=300),
    Rule(name="workload", scope="workload", value="held_bytes", above=GIB, keep_firing_for_seconds=300),
)
HOG = make_device(processes=(make_process(10, 9 * GIB),))
REPORT = (make_report(10, (make_pool(live=9 * GIB),)),)


def keeping(*snapshots: Snapshot) -> list[Advanced]:
    memory, results = TickState(), []
    for second, snapshot in enumerate(snapshots):
        results.append(evaluate(memory, KEEPING, replace(snapshot, seq=second + 1, elapsed_seconds=float(second)), ()))
        memory = results[-1].memory
    return results


def test_alerts_on_an_ended_process_resolve_with_the_next_reading_and_a_note():
    ended = keeping(make_snapshot(HOG, reports=REPORT), make_snapshot(make_device()))[1]
    assert ended.frame.alerts == ()
    assert {alert.rule: dict(alert.annotations)["summary"] for alert in ended.resolved} == {
        "hog": "process 10 has exited; the alert was: a hog",
        "pool": "process 10 has exited",
        "workload": "every program of train has exited",
    }


def test_alerts_on_a_suspended_process_resolve_at_once_and_say_so():
    suspended = make_snapshot(make_device(), reports=REPORT, suspended_programs=(make_suspended(10, 9 * GIB),))
    ticks = keeping(make_snapshot(HOG, reports=REPORT), suspended, make_snapshot(HOG, reports=REPORT))
    assert [sorted(alert.rule for alert in tick.frame.alerts) for tick in ticks] == [
        ["hog", "pool", "workload"],
        ["workload"],
        ["hog", "pool", "workload"],
    ]
    texts = {alert.rule: dict(alert.annotations)["summary"] for alert in ticks[1].resolved}
    assert texts == {"hog": "process 10 is suspended; the alert was: a hog", "pool": "process 10 is suspended"}


def test_alert_that_outlives_its_cause_says_so_once():
    small = make_snapshot(make_device(processes=(make_process(10, 1),)), reports=REPORT)
    ticks = keeping(make_snapshot(HOG, reports=REPORT), small, *[replace(small)] * 301)
    (over,) = [alert for tick in ticks for alert in tick.resolved]
    text = dict(over.annotations)["summary"]
    assert (over.rule, text.count("the alert was")) == ("hog", 1)
    assert text.startswith("ended at ")
    assert text.endswith(" UTC; the alert was: a hog")
    assert [dict(alert.annotations)["summary"] for alert in ticks[1].frame.alerts if alert.rule == "hog"] == [text]
    gone = keeping(make_snapshot(HOG, reports=REPORT), small, make_snapshot(make_device()))[-1].resolved
    texts = [dict(alert.annotations)["summary"] for alert in gone if alert.rule == "hog"]
    assert texts == ["process 10 has exited; the alert was: a hog"]


@pytest.mark.parametrize(
    "hidden",
    [
        make_snapshot(make_device(processes=(), missed_readings=3)),
        make_snapshot(make_device(processes=None), faults=(make_fault("GPU-a", "timeout"),)),
    ],
    ids=["device missed", "list not read"],
)
def test_unread_process_has_not_ended(hidden: Snapshot):
    before, after = keeping(make_snapshot(HOG, reports=REPORT), hidden)
    assert (after.resolved, len(after.frame.alerts)) == ((), len(before.frame.alerts))


def test_alert_on_a_hidden_process_resolves_with_the_first_complete_reading():
    hidden = make_snapshot(make_device(processes=None), faults=(make_fault("GPU-a", "timeout"),))
    *_, values_of_alerts = keeping(make_snapshot(HOG, reports=REPORT), hidden, hidden, make_snapshot(make_device()))
    assert (values_of_alerts.frame.alerts, len(values_of_alerts.resolved)) == ((), 3)
