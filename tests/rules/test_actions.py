"""The closed loop acts when it helps, seldom, and never in a loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gpumond.model.frame import Alert
from gpumond.model.pools import Expected, Held, Receipt
from gpumond.model.snapshot import AgentReport
from gpumond.rules import Action, Rule
from gpumond.rules.actions import (
    ANNOTATION,
    ActionTrack,
    FlushOrder,
    Tracks,
    annotate,
    conclude,
    decide,
    forget,
    remembered,
)
from gpumond.testing import GIB, make_pool, make_report

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


def a_rule(**action: Any) -> Rule:
    return Rule(
        name="waste",
        scope="device",
        value="reclaimable_ratio",
        above=0.3,
        action=Action(**{"cooldown_seconds": 100.0} | action),
    )


def wasting(pid: int = 10, cached: int = 4 * GIB, **fields: Any) -> AgentReport:
    return make_report(pid, (make_pool(live=GIB, cached=cached),), **fields)


def a_receipt(released: int, **fields: Any) -> Receipt:
    after = Held(5 * GIB - released, GIB, 4 * GIB - released, None)
    receipt = Receipt(
        pid=10,
        start_ticks=100,
        workload="train",
        device_uuid="GPU-a",
        allocator="torch",
        outcome="freed" if released else "nothing",
        reason="",
        expected=Expected(0, 4 * GIB, 4 * GIB),
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


def pids(rule: Rule, *reports: AgentReport, alert: Alert = ALERT, tracks: Tracks | None = None) -> list[int]:
    orders, _ = decide([rule], [alert], reports, tracks or {}, 1000.0)
    return [pid for order in orders for pid in order.pids]


def test_a_firing_alert_flushes_the_programs_that_it_is_about():
    assert pids(a_rule(), wasting(10), wasting(11)) == [10, 11]
    assert pids(a_rule(), make_report(12, (make_pool("GPU-b", cached=GIB),))) == []
    of_one = replace(ALERT, labels=(("pid", "11"), ("uuid", "GPU-a")))
    assert pids(a_rule(), wasting(10), wasting(11), alert=of_one) == [11]
    of_a_workload = replace(ALERT, labels=(("workload", "serve"),))
    assert pids(a_rule(), wasting(10), wasting(11, workload="serve"), alert=of_a_workload) == [11]


def test_a_pending_alert_and_a_rule_without_action_flush_nothing():
    assert pids(a_rule(), wasting(), alert=replace(ALERT, phase="pending")) == []
    assert pids(replace(a_rule(), action=None), wasting()) == []


def test_only_named_workloads_with_enough_to_give_that_allow_it():
    assert pids(a_rule(workloads=("batch-*",)), wasting(10), wasting(11, workload="batch-7")) == [11]
    assert pids(a_rule(min_reclaimable_bytes=5 * GIB), wasting(10), wasting(11, cached=6 * GIB)) == [11]
    assert pids(a_rule(), wasting(10, flush_policy="never"), wasting(11, cached=0)) == []


def acting(
    rule: Rule, released: int, regrows: bool, until: int = 20_000, failing: str = ""
) -> Iterator[tuple[int, ActionTrack]]:
    """A program whose alert fires all the time: when it is flushed, and the track after that."""
    tracks: Tracks = {}
    cached = 4 * GIB
    for now in range(0, until, 10):
        orders, tracks = decide([rule], [ALERT], [wasting(cached=cached)], tracks, float(now))
        tracks = forget(tracks, [ALERT], float(now))
        for order in orders:
            receipts = [] if failing else [a_receipt(released)]
            tracks = conclude(tracks, order, receipts, failing)
            cached = 4 * GIB if regrows else max(GIB, 4 * GIB - released)
            yield now, tracks[order.key]


def times(*arguments: Any, **named: Any) -> list[int]:
    return [now for now, _ in acting(*arguments, **named)]


def test_it_waits_its_cooldown_between_two_flushes():
    assert times(a_rule(max_per_hour=1000), released=2 * GIB, regrows=False, until=500) == [0, 100, 200, 300, 400]


def test_it_keeps_to_its_number_an_hour():
    flushed = times(a_rule(max_per_hour=2), released=2 * GIB, regrows=False, until=7300)
    assert flushed == [0, 100, 3600, 3700, 7200]


def test_it_keeps_to_its_number_over_all_alerts_of_the_rule():
    alerts = [replace(ALERT, labels=(("pid", str(pid)),)) for pid in range(10, 15)]
    orders, _ = decide([a_rule(max_per_hour=3)], alerts, [wasting(pid) for pid in range(10, 15)], {}, 0.0)
    assert len(orders) == 3


def test_flushes_that_release_nothing_come_at_twice_the_distance_each_and_say_so():
    flushed = list(acting(a_rule(max_per_hour=1000), released=0, regrows=False))
    assert [now for now, _ in flushed] == [0, 200, 600, 1400, 3000, 6200, 12600]
    assert "released nothing" in flushed[1][1].note
    assert "next try in 6 min 40 s" in flushed[1][1].note


def test_flushes_whose_memory_is_taken_again_come_at_twice_the_distance_each_and_say_so():
    rule = a_rule(max_per_hour=1000)
    assert times(rule, released=4 * GIB, regrows=True) == [0, 200, 600, 1400, 3000, 6200, 12600]
    orders, tracks = decide([rule], [ALERT], [wasting()], {}, 0.0)
    tracks = conclude(tracks, orders[0], [a_receipt(4 * GIB)])
    _, tracks = decide([rule], [ALERT], [wasting()], tracks, 100.0)
    assert "took again" in tracks[orders[0].key].note


def test_memory_that_an_agent_saw_taken_again_counts_although_it_is_free_by_now():
    def seen(thrashes: int) -> AgentReport:
        return make_report(10, (make_pool(live=GIB, cached=GIB, thrashes=thrashes),))

    (order,), tracks = decide([a_rule()], [ALERT], [seen(3)], {}, 0.0)
    tracks = conclude(tracks, order, [a_receipt(3 * GIB)])
    _, without = decide([a_rule()], [ALERT], [seen(3)], tracks, 100.0)
    _, thrashed = decide([a_rule()], [ALERT], [seen(4)], tracks, 100.0)
    assert without[order.key].failures == 0
    assert thrashed[order.key].failures == 1
    assert "took again" in thrashed[order.key].note


def test_a_flush_that_cannot_start_backs_off_too():
    flushed = list(acting(a_rule(max_per_hour=1000), released=0, regrows=False, until=700, failing="the disk is full"))
    assert [now for now, _ in flushed] == [0, 200, 600]
    assert flushed[0][1].note.startswith("no flush: the disk is full")


def test_nothing_is_flushed_while_a_flush_is_under_way():
    orders, tracks = decide([a_rule()], [ALERT], [wasting()], {}, 0.0)
    assert len(orders) == 1
    assert decide([a_rule()], [ALERT], [wasting()], tracks, 5000.0)[0] == []


def test_a_rehearsal_says_what_a_flush_would_return_and_is_no_failure():
    order = FlushOrder(ALERT, Action(dry_run=True), 1000, (wasting(),))
    track = conclude({}, order, [a_receipt(0, outcome="planned")])[order.key]
    assert track.note == "rehearsed: a flush of train would return 4.0 GiB"
    assert track.failures == 0


def test_the_receipt_is_an_annotation_of_the_alert():
    order = FlushOrder(ALERT, Action(), 1000, (wasting(),))
    tracks = conclude({}, order, [a_receipt(3 * GIB)])
    (alert,) = annotate([ALERT], tracks)
    assert dict(alert.annotations)[ANNOTATION] == "flushed train: 3.0 GiB released of 4.0 GiB expected"
    assert annotate([replace(ALERT, labels=())], tracks)[0].annotations == ALERT.annotations


def test_a_restart_forgets_no_flush_of_the_last_hour():
    key = (ALERT.rule, ALERT.labels, 1000)
    tracks = remembered([(key, 900.0), (key, 4950.0)], now=5000.0)
    rule = a_rule()
    assert decide([rule], [ALERT], [wasting()], tracks, 0.0)[0] == []
    assert len(decide([rule], [ALERT], [wasting()], tracks, 50.0)[0]) == 1
    assert decide([a_rule(max_per_hour=1)], [ALERT], [wasting()], tracks, 50.0)[0] == []


def test_what_is_long_over_is_forgotten():
    tracks = {(ALERT.rule, ALERT.labels, 1000): ActionTrack(attempts=(0.0,), note="flushed")}
    assert forget(tracks, [ALERT], 1e6) == tracks
    assert forget(tracks, [], 10.0)[ALERT.rule, ALERT.labels, 1000].note == ""
    assert forget(tracks, [], 1e6) == {}


def test_each_user_has_orders_of_its_own():
    orders, _ = decide([a_rule()], [ALERT], [wasting(10), wasting(20, uid=7), wasting(11)], {}, 0.0)
    assert {order.uid: order.pids for order in orders} == {7: (20,), 1000: (10, 11)}


def test_one_users_failures_do_not_slow_down_another_users_flushes():
    rule, tracks, flushed = a_rule(max_per_hour=3), {}, []
    for now in range(0, 500, 10):
        orders, tracks = decide([rule], [ALERT], [wasting(10), wasting(20, uid=7)], tracks, float(now))
        for order in orders:
            flushed.append((order.uid, now))
            released = 0 if order.uid == 7 else GIB
            after = Held(5 * GIB, GIB, 4 * GIB, None)
            tracks = conclude(tracks, order, [a_receipt(released, pid=order.pids[0], after=after)])
    assert [now for uid, now in flushed if uid == 1000] == [0, 100, 200]
    assert [now for uid, now in flushed if uid == 7] == [0, 200]


def test_a_release_below_zero_takes_nothing_from_the_others():
    (order,), tracks = decide([a_rule()], [ALERT], [wasting(10), wasting(11)], {}, 0.0)
    track = conclude(tracks, order, [a_receipt(-60 * GIB), a_receipt(2 * GIB, pid=11)])[order.key]
    assert track.failures == 0
    assert "2.0 GiB released" in track.note


def test_the_annotation_has_what_was_done_for_each_user():
    orders, tracks = decide([a_rule()], [ALERT], [wasting(10), wasting(20, uid=7, workload="serve")], {}, 0.0)
    for order in orders:
        tracks = conclude(tracks, order, [a_receipt(GIB, workload=order.programs[0].workload)])
    note = dict(annotate([ALERT], tracks)[0].annotations)[ANNOTATION]
    assert "flushed train: 1.0 GiB" in note
    assert "flushed serve: 1.0 GiB" in note
