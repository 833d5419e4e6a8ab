"""Values over the last minutes: increases, peaks, silent agents."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from math import inf

import pytest

from gpumond.facts.alerts import Rule
from gpumond.facts.pools import PoolUsage
from gpumond.facts.program import Call, Oom, OomPool, PoolLimit, Program
from gpumond.facts.snapshot import AgentReport, DeviceReading, Snapshot, XidErrors
from gpumond.features.rules.built_in import BUILT_IN
from gpumond.quantities import subjects
from gpumond.quantities.scope import RuleContext
from gpumond.quantities.window import (
    BUCKET_SECONDS,
    WINDOW_SECONDS,
    CounterHistory,
    OomNote,
    RuleWindow,
    new_counter_history,
    next_window,
    sum_of_known,
)
from gpumond.tick.ledger import make_ledger
from tests.helpers.agents import GIB
from tests.helpers.values import (
    Advanced,
    TickState,
    advance,
    make_device,
    make_pool,
    make_process,
    make_report,
    make_snapshot,
)

DEVICE = make_device(used_bytes=40 * GIB)


def snapshot_at(
    second: float, pools: Sequence[PoolUsage] = (), device: DeviceReading = DEVICE, **fields: object
) -> Snapshot:
    reports: tuple[AgentReport, ...] = (make_report(pools=tuple(pools)),) if pools else ()
    return make_snapshot(device, reports=reports, elapsed_seconds=second, **fields)


def value(recent: RuleWindow, snapshot: Snapshot, name: str, scope: str = "pool") -> float | None:
    ledger = advance(TickState(), (), snapshot).frame.ledger
    found = subjects(scope, RuleContext(snapshot, ledger, recent))  # type: ignore[arg-type]
    (row,) = found.rows
    return found.values[name](row)


def values_of(snapshots: Sequence[Snapshot], name: str, scope: str = "pool") -> list[float | None]:
    recent, values = RuleWindow(), []
    for snapshot in snapshots:
        recent = next_window(recent, snapshot)
        values.append(value(recent, snapshot, name, scope))
    return values


def text_of(snapshots: Sequence[Snapshot], name: str) -> str:
    """Return a text of the only device."""
    recent = RuleWindow()
    for snapshot in snapshots:
        recent = next_window(recent, snapshot)
    found = subjects("device", RuleContext(snapshots[-1], make_ledger(snapshots[-1]), recent))
    (row,) = found.rows
    return found.texts[name](row)


def test_time_until_a_device_is_full():
    free = [40, 40, 40, 40, 30, 20, 20, 20, 20, 20, 25]
    readings = [
        snapshot_at(5.0 * number, device=replace(DEVICE, used_bytes=80 * GIB - each * GIB, free_bytes=each * GIB))
        for number, each in enumerate(free)
    ]
    expected = [None, None, inf, inf, 60, 25, 25, 25, 25, 50, inf]
    assert values_of(readings, "time_to_full_30s_seconds", "device") == pytest.approx(expected)


def test_increase_is_the_count_within_the_window():
    """The count before the first report is not an increase, and the absence of an increase is unknown until a full
    window has passed.

    Therefore an alert that is restored after a restart is not resolved by it.
    """
    counts = [(0, 3), (1, 3), (2, 5), (300, 6), (2 + WINDOW_SECONDS, 6), (300 + WINDOW_SECONDS, 6)]
    assert values_of([snapshot_at(at, [make_pool(ooms=count)]) for at, count in counts], "ooms_increase") == [
        None,
        None,
        2,
        3,
        1,
        0,
    ]


def test_errors_followed_by_a_retry_are_no_increase():
    def at(second: float, ooms: int, other: int, retries: int) -> Snapshot:
        pools = (make_pool(ooms=ooms), make_pool(ooms=other, allocator="sim"))
        report = make_report(pools=pools, program=Program(oom_retries=retries))
        return make_snapshot(DEVICE, reports=(report,), elapsed_seconds=second)

    def increases(*snapshots: Snapshot) -> list[float | None]:
        recent = RuleWindow()
        for snapshot in snapshots:
            recent = next_window(recent, snapshot)
        ledger = advance(TickState(), (), snapshots[-1]).frame.ledger
        rows = subjects("pool", RuleContext(snapshots[-1], ledger, recent))
        return [rows.values["ooms_increase"](row) for row in rows.rows]

    start = at(0, 2, 0, 2)
    assert increases(start, at(1, 3, 0, 3)) == [None, None]
    assert increases(start, at(1, 3, 0, 3), at(2, 4, 0, 3)) == [1, None]
    assert increases(start, at(1, 3, 1, 3)) == [1, 1]  # the pool of the last error is unknown
    assert increases(start, at(1, 3, 0, 3), at(1 + WINDOW_SECONDS, 3, 0, 3)) == [0, 0]


def test_restarted_counter_has_increased_from_zero():
    assert values_of(
        [snapshot_at(at, [make_pool(retries=n)]) for at, n in enumerate((7, 9, 1))], "retries_increase"
    ) == [
        None,
        2,
        3,
    ]
    assert values_of([snapshot_at(0, [make_pool(retries=None)])], "retries_increase") == [None]


def test_xid_counts_from_its_first_report_on_a_lost_device_too():
    lost = make_device(missed_readings=3, up=False, size_bytes=None, used_bytes=None, processes=None)
    xid = (XidErrors("GPU-a", 79, 1, 5.0),)
    snapshots = [
        snapshot_at(0),
        snapshot_at(1, xids=xid),
        snapshot_at(2, device=lost, xids=xid),
        snapshot_at(2 + WINDOW_SECONDS, xids=xid),
    ]
    assert values_of(snapshots, "xid_errors_increase", "device") == [None, 1, 1, 0]


def test_fragmentation_uses_the_peak():
    """A pool that is mostly empty between its steps is not fragmented if they fill it."""
    busy, idle = make_pool(live=38 * GIB, stranded=2 * GIB), make_pool(live=2 * GIB, stranded=38 * GIB)
    healthy = values_of([snapshot_at(at, [busy if at % 5 == 0 else idle]) for at in range(70)], "fragmentation_ratio")
    assert healthy[59] is None
    assert healthy[61] == pytest.approx(0.05)
    split = [make_pool(live=20 * GIB, stranded=min(at, 20) * GIB) for at in range(70)]
    assert values_of([snapshot_at(at, [pool]) for at, pool in enumerate(split)], "fragmentation_ratio")[-1] == 0.5


def test_fragmentation_that_a_program_has_freed_is_not_that_of_its_next_round():
    split = [make_pool(live=20 * GIB, stranded=20 * GIB)] * 70
    rounds = [*split, make_pool(live=0, cached=40 * GIB), *[make_pool(live=30 * GIB)] * 10]
    values = values_of([snapshot_at(at, [pool]) for at, pool in enumerate(rounds)], "fragmentation_ratio")
    assert (values[69], values[70], values[-1]) == (0.5, 0, 0)


def test_fragmentation_of_several_rounds_is_one_alert():
    rule = next(rule for rule in BUILT_IN if rule.name == "fragmentation")
    split, freed = make_pool(live=20 * GIB, stranded=20 * GIB), make_pool(live=0, cached=40 * GIB)
    state, changes = TickState(), list[tuple[int, str]]()
    for at, pool in enumerate([*[*[split] * 100, *[freed] * 60] * 3, *[freed] * 300]):
        advanced = advance(state, (rule,), snapshot_at(at, [pool]))
        state = advanced.memory
        changes += [(at, alert.phase) for alert in (*advanced.raised, *advanced.resolved)]
    assert changes == [(90, "firing"), (420 + 300, "resolved")]


def test_peak_between_reports_counts_if_the_allocator_recorded_it():
    low = [make_pool(live=10 * GIB, stranded=30 * GIB, peak_live_bytes=39 * GIB) for _ in range(70)]
    fragmentation = values_of([snapshot_at(at, [pool]) for at, pool in enumerate(low)], "fragmentation_ratio")
    assert fragmentation[-1] == pytest.approx(0.025)


def test_cache_and_small_pools_are_not_fragmented():
    cache = [snapshot_at(at, [make_pool(live=5 * GIB, cached=30 * GIB)]) for at in range(70)]
    assert values_of(cache, "fragmentation_ratio")[-1] == 0
    small = [snapshot_at(at, [make_pool(live=GIB, stranded=2 * GIB)]) for at in range(70)]
    assert values_of(small, "fragmentation_ratio")[-1] == 0


def test_alert_on_fragmentation_says_when_nothing_is_stranded_any_more():
    (rule,) = (each for each in BUILT_IN if each.name == "fragmentation")
    split, whole = make_pool(live=10 * GIB, stranded=10 * GIB), make_pool(live=10 * GIB)
    state, shown = TickState(), []
    for at, pool in enumerate([*[split] * 120, whole, whole]):
        advanced = advance(state, [rule], snapshot_at(at, [pool]))
        state = advanced.memory
        shown += [dict(alert.annotations) for alert in advanced.frame.alerts if alert.phase == "firing"]
    peak = "50% of its torch pool (not counting cached memory) was fragmented even at peak use (10.0 GiB stranded)"
    assert shown[0]["summary"].endswith(peak)
    assert "description" in shown[0]
    assert shown[-1] == shown[-2]
    assert shown[-1]["summary"].startswith("ended at ")
    assert shown[-1]["summary"].endswith(peak)
    assert "; the alert was: train (pid " in shown[-1]["summary"]
    assert "description" not in shown[-1]


def test_cache_is_waste_only_while_memory_is_short():
    mine = make_pool(live=GIB, cached=16 * GIB, ooms=0)
    other = make_report(11, (make_pool(live=GIB, cached=8 * GIB, ooms=0),), workload="serve")
    starved = make_report(11, (make_pool(live=GIB, cached=8 * GIB, ooms=1),), workload="serve")
    reports = [(make_report(pools=(mine,)), other), (make_report(pools=(mine,)), starved)]
    snapshots = [make_snapshot(DEVICE, reports=own, elapsed_seconds=float(at)) for at, own in enumerate(reports)]
    full = make_snapshot(make_device(used_bytes=64 * GIB), reports=reports[0], elapsed_seconds=9.0)
    assert values_of(snapshots, "reclaimable_under_pressure_ratio", "device") == [0, 0.2]
    assert values_of([full], "reclaimable_under_pressure_ratio", "device") == [0.3]
    assert [text_of(snapshots, "shortage"), text_of([full], "shortage")] == [
        "had too little room for serve in the last 10 minutes",
        "is 80% full",
    ]


@pytest.mark.parametrize(("limit", "waste"), [(12, 0), (60, 0.2)])
def test_a_program_that_reached_its_own_limit_is_no_shortage_of_the_device(limit: int, waste: float):
    pools = [(make_pool(live=10 * GIB, cached=0, ooms=ooms),) for ooms in (0, 1)]
    limits = (PoolLimit("torch", "GPU-a", limit * GIB, "chat"),)
    other = make_report(11, (make_pool(live=GIB, cached=16 * GIB, ooms=0),))
    reports = [(make_report(pools=own, limits=limits), other) for own in pools]
    reports.append((make_report(pools=pools[1]), other))  # the limit is removed
    snapshots = [make_snapshot(DEVICE, reports=own, elapsed_seconds=float(at)) for at, own in enumerate(reports)]
    assert values_of(snapshots, "reclaimable_under_pressure_ratio", "device") == [0, waste, waste]


@pytest.mark.parametrize(
    ("limit", "happened", "state", "relief"),
    [
        (
            12,
            "reached its limit of 12.0 GiB",
            "reached its limit of 12.0 GiB",
            "raise the program's limit (to see where it's set: gpumond quota)",
        ),
        (60, "ran out of memory", "was short of memory", "free memory on the GPU"),
    ],
)
def test_alerts_say_whether_a_program_reached_its_own_limit(limit: int, happened: str, state: str, relief: str):
    at_error = OomPool(allocator="torch", device_uuid="GPU-a", live_bytes=11 * GIB, cached_bytes=0, stranded_bytes=0)
    oom = Oom(
        number=1,
        at=1_000_000.0,
        seen="scope",
        device_uuid="GPU-a",
        request_bytes=4 * GIB,
        pools=(at_error,),
        free_bytes=20 * GIB if limit == 12 else GIB,
    )
    limits = (PoolLimit("torch", "GPU-a", limit * GIB, "chat"),)
    state_, window = TickState(), []
    rules = [each for each in BUILT_IN if each.name in ("out-of-memory", "allocation-retries")]
    for at, count in enumerate((0, 6)):
        pool = make_pool(live=10 * GIB, cached=0, ooms=count, retries=count)
        report = make_report(pools=(pool,), limits=limits, program=Program(ooms=(oom,) if count else ()))
        advanced = advance(state_, rules, make_snapshot(DEVICE, reports=(report,), elapsed_seconds=float(at)))
        state_ = advanced.memory
        window = [dict(alert.annotations) for alert in advanced.frame.alerts]
    first, retries = window
    assert f"{happened} (6x in the last 10 minutes)" in first["summary"]
    assert retries["summary"].endswith(f" {state}: 6 allocation retries in 10 minutes slowed it down")
    assert retries["description"].startswith(f"reduce the batch size or {relief}")
    raised = dataclasses.replace(report, limits=(PoolLimit("torch", "GPU-a", 70 * GIB, "chat"),))
    later = advance(state_, rules, make_snapshot(DEVICE, reports=(raised,), elapsed_seconds=2.0)).frame.alerts[1]
    changed = ", which has changed since" if limit == 12 else ""
    assert f" {state}{changed}: 6 allocation retries" in dict(later.annotations)["summary"]


GONE = (
    Rule(name="agent-gone", scope="process", value="agent_gone", above=0),
    Rule(name="hog", scope="pool", value="held_bytes", above=GIB),
)


def walk(*snapshots: Snapshot) -> list[Advanced]:
    memory, ticks = TickState(), []
    for snapshot in snapshots:
        ticks.append(advance(memory, GONE, snapshot))
        memory = ticks[-1].memory
    return ticks


def test_silent_agent_is_a_value_and_alerts_of_its_pools_continue():
    """Its alerts end when the process has left the device."""
    device, pool = make_device(processes=(make_process(10, 2 * GIB),)), make_pool(live=2 * GIB)
    ticks = walk(snapshot_at(0, [pool], device), snapshot_at(1, (), device), snapshot_at(2, (), make_device()))
    assert [[alert.rule for alert in tick.raised] for tick in ticks] == [["hog"], ["agent-gone"], []]
    assert [{alert.rule for alert in tick.resolved} for tick in ticks] == [set(), set(), {"hog", "agent-gone"}]


def test_process_that_never_had_an_agent_is_not_silent():
    device = make_device(processes=(make_process(10),))
    assert [tick.raised for tick in walk(snapshot_at(0, (), device), snapshot_at(1, (), device))] == [(), ()]


@pytest.mark.parametrize("jump", [3600.0, -3600.0, 315_360_000.0, -315_360_000.0])
def test_clock_jump_changes_no_value_of_the_built_in_rules(jump: float):
    def story(clock: float) -> list[tuple[list[str], list[str]]]:
        memory, values = TickState(), []
        for second in range(0, 900, 5):
            full = second < 300
            device = make_device(used_bytes=(70 if full else 20) * GIB, processes=(make_process(10, 20 * GIB),))
            pool = make_pool(live=10 * GIB, stranded=8 * GIB, ooms=second // 200)
            moved = clock if second >= 120 else 0.0
            snapshot = snapshot_at(float(second), [pool], device, taken_at=1e9 + second + moved)
            tick = advance(memory, BUILT_IN, snapshot)
            memory = tick.memory
            values.append(([alert.rule for alert in tick.raised], [alert.rule for alert in tick.resolved]))
        return values

    assert any(raised for raised, _ in story(0.0))
    assert story(jump) == story(0.0)


Observation = tuple[float, float | None]


def increases(observations: Sequence[Observation]) -> list[float | None]:
    """Increases at the times of the observations."""
    history: CounterHistory | None = None
    found = []
    for elapsed, count in observations:
        if history is None:
            history = new_counter_history((count,), elapsed)
        elif history.is_due(elapsed):
            history = history.with_sample((count,), elapsed)
        found.append(history.increase(0, count, elapsed))
    return found


def test_increase_is_known_at_once_and_zero_after_a_full_window():
    assert increases([(0, 7), (1, 7), (2, 9)]) == [None, None, 2]
    steady = [(at, 7.0) for at in range(0, int(WINDOW_SECONDS) + 1, int(BUCKET_SECONDS))]
    assert increases(steady) == [None] * (len(steady) - 1) + [0]


def test_increase_leaves_the_window():
    counts = [(0.0, 7.0), *((float(at), 9.0) for at in range(30, 1201, 30))]
    found = dict(zip((at for at, _ in counts), increases(counts), strict=True))
    assert found[30] == found[WINDOW_SECONDS - BUCKET_SECONDS] == 2
    assert found[WINDOW_SECONDS + BUCKET_SECONDS] == 0


def test_increase_between_two_marks_is_counted_once():
    assert increases([(0, 0), (10, 1), (20, 3), (31, 4), (40, 4), (62, 5)]) == [None, 1, 3, 4, 4, 5]


def test_count_of_a_counter_that_was_reset_is_an_increase():
    assert increases([(0, 100), (30, 104), (60, 3), (90, 5)]) == [None, 4, 7, 9]


@pytest.mark.parametrize("counts", [(None, None), (5.0, None), (None, 5.0)])
def test_increase_of_an_unknown_count_is_unknown(counts: tuple[float | None, float | None]):
    assert increases([(0, counts[0]), (1, counts[1])])[-1] is None


def test_gap_does_not_lose_an_increase():
    assert increases([(0, 5), (30, None), (60, 8)])[-1] == 3


def test_counts_that_do_not_change_need_two_marks():
    history = new_counter_history((7.0, None), 0.0)
    for at in range(30, 3600, 30):
        history = history.with_sample((7.0, None), float(at))
    assert len(history.samples) == 2
    assert history.with_sample((8.0, None), 3600.0).increase(0, 8.0, 3600.0) == 1


def test_increase_after_a_long_time_without_change_is_known():
    assert increases([*((float(at), 7.0) for at in range(0, 3600, 30)), (3600.0, 9.0)])[-1] == 2


def test_marks_are_bounded():
    history = new_counter_history((0.0,), 0.0)
    for at in range(30, 36_000, 30):
        history = history.with_sample((float(at),), float(at))
    assert len(history.samples) <= WINDOW_SECONDS / BUCKET_SECONDS + 1


def test_sum_of_increases_ignores_unknown_ones():
    assert (sum_of_known((None, 2.0, 3.0)), sum_of_known((None, None))) == (5.0, None)


def test_line_of_an_out_of_memory_error_stays_when_its_agent_no_longer_sends_the_stack():
    oom = Oom(number=1, at=1.0, seen="scope", stack=(Call("train.py", 31, "step"),))
    recent = RuleWindow()
    for second, sent in enumerate((oom, replace(oom, stack=()))):
        report = make_report(program=Program(ooms=(sent,)))
        recent = next_window(recent, make_snapshot(DEVICE, reports=(report,), elapsed_seconds=float(second)))
        assert recent.oom_notes == {(report.key, 1): OomNote(None, " in `step` at train.py:31")}
    assert next_window(recent, make_snapshot(DEVICE, reports=(make_report(),), elapsed_seconds=2.0)).oom_notes == {}
