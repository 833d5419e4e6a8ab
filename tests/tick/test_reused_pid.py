"""A pid that is reused between two ticks: nothing of the old process is attached to the new one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpumond.events import EventState, advance_events
from gpumond.facts.alerts import Action, Rule
from gpumond.facts.flush import Target
from gpumond.facts.frame import Verdict
from gpumond.facts.program import ProcessKey
from gpumond.facts.snapshot import AgentReport, ProcessUsage, Reading, Snapshot, SourceState
from gpumond.features.alerts.action_decisions import annotate, decide_actions, states_after_flush
from gpumond.metrics.catalog import FAMILIES
from gpumond.serve.full_frame import holdings
from gpumond.tick.observe import observe
from gpumond.view.frame import frame_view
from tests.helpers.agents import GIB
from tests.helpers.frames import make_frame
from tests.helpers.values import (
    Advanced,
    TickState,
    advance,
    evaluate,
    make_device,
    make_pool,
    make_process,
    make_report,
)

PID, UUID = 10, "GPU-a"
OLD, NEW, UNKNOWN = ProcessKey(PID, 100), ProcessKey(PID, 200), ProcessKey(PID, None)
UP = SourceState(name="test", up=True, responsive=True)
POOL = make_pool(UUID, live=GIB, cached=2 * GIB)
REPORT = make_report(PID, (POOL,), workload="train", start_ticks=100)
LEAK = Verdict(device_uuid=UUID, pid=PID, start_ticks=100, kind="leak", since=1.0, summary="train leaks")
RULES = (
    Rule(name="full", scope="process", value="used_bytes", above=0),
    Rule(name="slow", scope="process", value="used_bytes", above=0, for_seconds=60),
    Rule(name="leak", scope="process", value="leak", above=0.5),
    Rule(name="pool", scope="pool", value="held_bytes", above=0, keep_firing_for_seconds=60),
)


def listed(start_ticks: int | None) -> ProcessUsage:
    return make_process(PID, 4 * GIB, start_ticks=start_ticks, comm="new" if start_ticks == 200 else "old")


def after(before: Snapshot | None, processes: tuple[ProcessUsage, ...], reports: tuple[AgentReport, ...]) -> Snapshot:
    """The snapshot 10 s after ``before``."""
    reading = Reading(devices=(make_device(UUID, used_bytes=4 * GIB, processes=processes),))
    at = before.elapsed_seconds + 10 if before else 0.0
    return observe(before, UP, reading, reports, 1e6 + at, at)


def with_old() -> Advanced:
    first = after(None, (listed(100),), (REPORT,))
    second = after(first, (listed(100),), (REPORT,))
    return evaluate(evaluate(TickState(), RULES, first, (LEAK,)).memory, RULES, second, (LEAK,))


@pytest.mark.parametrize("start", [200, None])
@pytest.mark.parametrize("reports", [(), (REPORT,)])
def test_old_report_gives_the_new_process_neither_workload_nor_shares(
    start: int | None, reports: tuple[AgentReport, ...]
):
    tick = evaluate(TickState(), RULES, after(None, (listed(start),), reports), ())
    new = next(each for each in holdings(tick.frame) if each.start_ticks == start)
    assert (new.workload, new.live_bytes, new.opaque_bytes) == ("", None, 4 * GIB)
    info = next(family for family in FAMILIES if family.name == "gpumond_process_info")
    assert [labels[3] for labels, _ in info.rows(tick.frame)] == [""]
    assert tick.frame.snapshot.reports_by_process.get(ProcessKey(PID, start)) is None


def test_old_alerts_resolve_and_those_of_the_new_process_begin():
    before = with_old()
    snapshot = after(before.frame.snapshot, (listed(200),), ())
    tick = evaluate(before.memory, RULES, snapshot, ())
    alerts = {alert.rule: alert for alert in tick.frame.alerts}
    assert set(alerts) == {"full", "slow"}
    assert {alert.process for alert in alerts.values()} == {NEW}
    assert {alert.active_at for alert in alerts.values()} == {snapshot.taken_at}
    assert {(alert.rule, alert.process) for alert in tick.resolved} == {
        (name, OLD) for name in ("full", "leak", "pool")
    }
    assert all("process 10 has exited" in dict(alert.annotations)["summary"] for alert in tick.resolved)
    assert [(alert.rule, alert.process) for alert in tick.raised] == [("full", NEW)]


def test_alerts_continue_while_the_start_is_unknown():
    before = with_old()
    tick = evaluate(before.memory, RULES, after(before.frame.snapshot, (listed(None),), ()), ())
    full = next(alert for alert in tick.frame.alerts if alert.rule == "full")
    assert (full.process, full.active_at, full in tick.raised) == (OLD, 1e6, False)
    again = evaluate(tick.memory, RULES, after(tick.frame.snapshot, (listed(200),), ()), ())
    assert [(alert.rule, alert.process) for alert in again.raised] == [("full", NEW)]


@pytest.mark.parametrize("start", [200, None])
def test_old_verdict_is_no_value_of_the_new_process(start: int | None):
    tick = evaluate(TickState(), RULES, after(None, (listed(start),), ()), (LEAK,))
    assert "leak" not in {alert.rule for alert in tick.frame.alerts}


def test_verdict_that_ends_is_an_event_of_the_old_process():
    before = with_old().frame
    state, _ = advance_events(EventState(), before)
    snapshot = after(before.snapshot, (listed(200),), ())
    _, events = advance_events(state, replace(before, snapshot=snapshot, verdicts=()))
    (ended,) = [event for event in events if event.kind == "verdict-ended"]
    assert (ended.pid, ended.start_ticks, ended.workload) == (PID, 100, "train")
    assert ended.summary.endswith("the process has exited")


def test_old_history_is_not_continued():
    snapshot, memory = None, TickState()
    for processes in ((listed(100),),) * 5 + ((listed(200),),) * 3:
        snapshot = after(snapshot, processes, ())
        memory = advance(memory, (), snapshot).memory
    history = memory.diagnosis.history
    assert [len(history.series((UUID, key), "used")) for key in (OLD, NEW, UNKNOWN)] == [5, 3, 0]
    assert history.newest_process(UUID, PID) == NEW


def test_rule_flushes_no_other_process_than_that_of_its_alert():
    rules = (replace(RULES[0], action=Action()),)
    alert = next(alert for alert in with_old().frame.alerts if alert.rule == "full")
    other = replace(REPORT, start_ticks=200)
    assert [order.programs for order in decide_actions(rules, [alert], (other, REPORT), {}, 0.0)[0]] == [(REPORT,)]
    for process in (NEW, UNKNOWN):
        unlike = replace(alert, start_ticks=process.start_ticks)
        assert not decide_actions(rules, [unlike], (REPORT,), {}, 0.0)[0]


def test_note_of_a_flush_is_not_on_the_alert_of_the_new_process():
    rules = (replace(RULES[0], action=Action()),)
    alert = next(alert for alert in with_old().frame.alerts if alert.rule == "full")
    (order,), tracks = decide_actions(rules, [alert], (REPORT,), {}, 0.0)
    tracks = states_after_flush(tracks, order, (), "the agent disconnected")
    assert dict(annotate([alert], tracks)[0].annotations)["action"].startswith("no flush: the agent disconnected")
    new = replace(alert, start_ticks=200)
    assert annotate([new], tracks) == (new,)


def test_top_shows_no_old_report_and_no_old_verdict_for_the_new_process():
    refusing = make_report(PID, (POOL,), flush_policy="never", start_ticks=100)
    device = make_device(UUID, used_bytes=4 * GIB, processes=(listed(200),))
    content = frame_view(make_frame(device, reports=(refusing,), verdicts=(LEAK,)))
    (new,) = content.processes
    assert (new.key[1], new.flush_policy, new.verdict) == (NEW, None, "")


def test_flush_of_a_process_does_not_match_another_one_with_its_pid():
    other = replace(REPORT, start_ticks=200)
    target = Target(pid=PID, start_ticks=100)
    assert [target.matches(report) for report in (REPORT, other)] == [True, False]
    assert all(Target(pid=PID).matches(report) for report in (REPORT, other))
