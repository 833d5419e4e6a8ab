"""Actions of rules: flush where it helps, at a limited rate, with back-off."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gpumond.facts.alerts import Action, Rule
from gpumond.facts.frame import Alert
from gpumond.facts.pools import ExpectedRelease, PoolBytes, Receipt
from gpumond.facts.snapshot import AgentReport
from gpumond.features.alerts.action_decisions import (
    ACTION_ANNOTATION,
    ActionOrder,
    ActionState,
    ActionStates,
    annotate,
    decide_actions,
    forget_ended,
    restored_states,
    states_after_flush,
)
from tests.helpers.agents import GIB
from tests.helpers.values import make_pool, make_report

LABELS = (("alertname", "waste"), ("gpu", "0"), ("uuid", "GPU-a"))
ALERT = Alert(
    rule="waste",
    phase="firing",
    labels=LABELS,
    annotations=(("summary", "much"),),
    value=0.5,
    active_at=1.0,
    fired_at=2.0,
)


def make_rule(**action: Any) -> Rule:
    return Rule(
        name="waste",
        scope="device",
        value="reclaimable_ratio",
        above=0.3,
        action=Action(**{"cooldown_seconds": 100.0} | action),
    )


def wasting(pid: int = 10, cached: int = 4 * GIB, **fields: Any) -> AgentReport:
    return make_report(pid, (make_pool(live=GIB, cached=cached),), **fields)


def make_receipt(released: int, **fields: Any) -> Receipt:
    after = PoolBytes(5 * GIB - released, GIB, 4 * GIB - released, None)
    receipt = Receipt(
        pid=10,
        start_ticks=100,
        workload="train",
        device_uuid="GPU-a",
        allocator="torch",
        outcome="freed" if released else "nothing",
        reason="",
        expected=ExpectedRelease(0, 4 * GIB, 4 * GIB),
        released_bytes=released,
        driver_released_bytes=None,
        before=None,
        after=after,
        steps=(),
        raced=False,
        requested_by="rule:waste",
        started_at=1.0,
        duration_seconds=0.1,
    )
    return replace(receipt, **fields)


def test_program_without_cache_is_asked_to_end_and_flushed_otherwise_not():
    idle = wasting(cached=0)
    assert pids(make_rule(), idle) == []
    assert pids(make_rule(request_end=True), idle) == [10]
    assert pids(make_rule(request_end=True), replace(idle, flush_policy="never")) == []


def test_results_of_requests_to_end_are_in_the_annotation():
    (order,), tracks = decide_actions([make_rule(request_end=True)], [ALERT], [wasting()], {}, 1000.0)
    tracks = states_after_flush(tracks, order, [make_receipt(GIB)], "", ["train (pid 10) was asked to exit"])
    (alert,) = annotate([ALERT], tracks)
    note = dict(alert.annotations)[ACTION_ANNOTATION]
    assert note.startswith("flushed train: 1.0 GiB released")
    assert note.endswith("; train (pid 10) was asked to exit")


def pids(rule: Rule, *reports: AgentReport, alert: Alert = ALERT, tracks: ActionStates | None = None) -> list[int]:
    flush_requests, _ = decide_actions([rule], [alert], reports, tracks or {}, 1000.0)
    return [pid for flush_request in flush_requests for pid in flush_request.pids]


def test_firing_alert_flushes_its_programs():
    assert pids(make_rule(), wasting(10), wasting(11)) == [10, 11]
    assert pids(make_rule(), make_report(12, (make_pool("GPU-b", cached=GIB),))) == []
    of_one = replace(ALERT, labels=(("pid", "11"), ("uuid", "GPU-a")))
    assert pids(make_rule(), wasting(10), wasting(11), alert=of_one) == [11]
    of_a_workload = replace(ALERT, labels=(("workload", "serve"),))
    assert pids(make_rule(), wasting(10), wasting(11, workload="serve"), alert=of_a_workload) == [11]


def test_pending_alert_and_a_rule_without_action_flush_nothing():
    assert pids(make_rule(), wasting(), alert=replace(ALERT, phase="pending")) == []
    assert pids(replace(make_rule(), action=None), wasting()) == []


def test_flush_is_limited_to_named_workloads_that_allow_it_with_enough_reclaimable_bytes():
    assert pids(make_rule(workloads=("batch-*",)), wasting(10), wasting(11, workload="batch-7")) == [11]
    assert pids(make_rule(min_reclaimable_bytes=5 * GIB), wasting(10), wasting(11, cached=6 * GIB)) == [11]
    assert pids(make_rule(), wasting(10, flush_policy="never"), wasting(11, cached=0)) == []


def flushes_of(
    rule: Rule, released: int, regrows: bool, until: int = 20_000, failing: str = ""
) -> Iterator[tuple[int, ActionState]]:
    """Yield the times of the flushes of a program whose alert always fires, with the track after each."""
    tracks: ActionStates = {}
    cached = 4 * GIB
    for now in range(0, until, 10):
        flush_requests, tracks = decide_actions([rule], [ALERT], [wasting(cached=cached)], tracks, float(now))
        tracks = forget_ended(tracks, [ALERT], float(now))
        for flush_request in flush_requests:
            receipts = [] if failing else [make_receipt(released)]
            tracks = states_after_flush(tracks, flush_request, receipts, failing)
            cached = 4 * GIB if regrows else max(GIB, 4 * GIB - released)
            yield now, tracks[flush_request.key]


def times(*arguments: Any, **named: Any) -> list[int]:
    return [now for now, _ in flushes_of(*arguments, **named)]


def test_flushes_are_a_cooldown_apart():
    assert times(make_rule(max_per_hour=1000), released=2 * GIB, regrows=False, until=500) == [0, 100, 200, 300, 400]


def test_flushes_per_hour_are_limited():
    flushed = times(make_rule(max_per_hour=2), released=2 * GIB, regrows=False, until=7300)
    assert flushed == [0, 100, 3600, 3700, 7200]


def test_flushes_per_hour_are_limited_over_all_alerts_of_a_rule():
    alerts = [replace(ALERT, labels=(("pid", str(pid)),)) for pid in range(10, 15)]
    flush_requests, _ = decide_actions(
        [make_rule(max_per_hour=3)], alerts, [wasting(pid) for pid in range(10, 15)], {}, 0.0
    )
    assert len(flush_requests) == 3


def test_flushes_without_release_back_off_exponentially_with_a_note():
    flushed = list(flushes_of(make_rule(max_per_hour=1000), released=0, regrows=False))
    assert [now for now, _ in flushed] == [0, 200, 600, 1400, 3000, 6200, 12600]
    assert "released nothing" in flushed[1][1].note
    assert "next attempt in 6 min 40 s" in flushed[1][1].note


def test_refilled_flushes_back_off_exponentially_with_a_note():
    rule = make_rule(max_per_hour=1000)
    assert times(rule, released=4 * GIB, regrows=True) == [0, 200, 600, 1400, 3000, 6200, 12600]
    flush_requests, tracks = decide_actions([rule], [ALERT], [wasting()], {}, 0.0)
    tracks = states_after_flush(tracks, flush_requests[0], [make_receipt(4 * GIB)])
    _, tracks = decide_actions([rule], [ALERT], [wasting()], tracks, 100.0)
    assert "reallocated" in tracks[flush_requests[0].key].note


def test_refilled_flush_reported_by_an_agent_counts_after_the_memory_is_free_again():
    def reports_with_refills(refilled_flushes: int) -> AgentReport:
        return make_report(10, (make_pool(live=GIB, cached=GIB, refilled_flushes=refilled_flushes),))

    (flush_request,), tracks = decide_actions([make_rule()], [ALERT], [reports_with_refills(3)], {}, 0.0)
    tracks = states_after_flush(tracks, flush_request, [make_receipt(3 * GIB)])
    _, without = decide_actions([make_rule()], [ALERT], [reports_with_refills(3)], tracks, 100.0)
    _, refilled = decide_actions([make_rule()], [ALERT], [reports_with_refills(4)], tracks, 100.0)
    assert without[flush_request.key].failures == 0
    assert refilled[flush_request.key].failures == 1
    assert "reallocated" in refilled[flush_request.key].note


def test_flush_that_cannot_start_backs_off():
    flushed = list(
        flushes_of(make_rule(max_per_hour=1000), released=0, regrows=False, until=700, failing="the disk is full")
    )
    assert [now for now, _ in flushed] == [0, 200, 600]
    assert flushed[0][1].note.startswith("no flush: the disk is full")


def test_suspension_that_cannot_start_is_not_called_a_flush():
    order = ActionOrder(alert=ALERT, action=Action(suspend=True), uid=1000, programs=(wasting(),))
    note = states_after_flush({}, order, (), "the disk is full")[order.key].note
    assert note.startswith("no suspension: the disk is full")


def test_flush_is_not_repeated_while_one_is_in_progress():
    flush_requests, tracks = decide_actions([make_rule()], [ALERT], [wasting()], {}, 0.0)
    assert len(flush_requests) == 1
    assert decide_actions([make_rule()], [ALERT], [wasting()], tracks, 5000.0)[0] == []


def test_dry_run_notes_the_expected_bytes_and_is_no_failure():
    flush_request = ActionOrder(alert=ALERT, action=Action(dry_run=True), uid=1000, programs=(wasting(),))
    track = states_after_flush({}, flush_request, [make_receipt(0, outcome="planned")])[flush_request.key]
    assert track.note == "dry run: a flush of train would release 4.0 GiB"
    assert track.failures == 0


def test_receipt_is_in_the_annotation_of_the_alert():
    flush_request = ActionOrder(alert=ALERT, action=Action(), uid=1000, programs=(wasting(),))
    tracks = states_after_flush({}, flush_request, [make_receipt(3 * GIB)])
    (alert,) = annotate([ALERT], tracks)
    assert dict(alert.annotations)[ACTION_ANNOTATION] == "flushed train: 3.0 GiB released, 4.0 GiB expected"
    assert annotate([replace(ALERT, labels=())], tracks)[0].annotations == ALERT.annotations


def test_flushes_of_the_last_hour_survive_a_restart():
    key = (ALERT.rule, ALERT.labels, 1000)
    tracks = restored_states([(key, 900.0), (key, 4950.0)], now=5000.0)
    rule = make_rule()
    assert decide_actions([rule], [ALERT], [wasting()], tracks, 0.0)[0] == []
    assert len(decide_actions([rule], [ALERT], [wasting()], tracks, 50.0)[0]) == 1
    assert decide_actions([make_rule(max_per_hour=1)], [ALERT], [wasting()], tracks, 50.0)[0] == []


def test_tracks_of_ended_alerts_are_dropped_after_an_hour():
    tracks = {(ALERT.rule, ALERT.labels, 1000): ActionState(attempt_times=(0.0,), note="flushed")}
    assert forget_ended(tracks, [ALERT], 1e6) == tracks
    assert forget_ended(tracks, [], 10.0)[ALERT.rule, ALERT.labels, 1000].note == ""
    assert forget_ended(tracks, [], 1e6) == {}


def test_users_have_separate_flushes():
    flush_requests, _ = decide_actions([make_rule()], [ALERT], [wasting(10), wasting(20, uid=7), wasting(11)], {}, 0.0)
    assert {flush_request.uid: flush_request.pids for flush_request in flush_requests} == {7: (20,), 1000: (10, 11)}


def test_failures_of_one_user_do_not_delay_flushes_of_another():
    rule, tracks, flushed = make_rule(max_per_hour=3), {}, []
    for now in range(0, 500, 10):
        flush_requests, tracks = decide_actions([rule], [ALERT], [wasting(10), wasting(20, uid=7)], tracks, float(now))
        for flush_request in flush_requests:
            flushed.append((flush_request.uid, now))
            released = 0 if flush_request.uid == 7 else GIB
            after = PoolBytes(5 * GIB, GIB, 4 * GIB, None)
            tracks = states_after_flush(
                tracks, flush_request, [make_receipt(released, pid=flush_request.pids[0], after=after)]
            )
    assert [now for uid, now in flushed if uid == 1000] == [0, 100, 200]
    assert [now for uid, now in flushed if uid == 7] == [0, 200]


def test_negative_release_does_not_reduce_the_total():
    (flush_request,), tracks = decide_actions([make_rule()], [ALERT], [wasting(10), wasting(11)], {}, 0.0)
    track = states_after_flush(tracks, flush_request, [make_receipt(-60 * GIB), make_receipt(2 * GIB, pid=11)])[
        flush_request.key
    ]
    assert track.failures == 0
    assert "2.0 GiB released" in track.note


def test_annotation_has_the_result_for_each_user():
    flush_requests, tracks = decide_actions(
        [make_rule()], [ALERT], [wasting(10), wasting(20, uid=7, workload="serve")], {}, 0.0
    )
    for flush_request in flush_requests:
        tracks = states_after_flush(
            tracks, flush_request, [make_receipt(GIB, workload=flush_request.programs[0].workload)]
        )
    note = dict(annotate([ALERT], tracks)[0].annotations)[ACTION_ANNOTATION]
    assert "flushed train: 1.0 GiB" in note
    assert "flushed serve: 1.0 GiB" in note
