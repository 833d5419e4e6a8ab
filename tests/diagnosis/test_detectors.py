from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from math import exp, inf, nan

import pytest

from gpumond.diagnosis.detectors import FRAGMENTED_RATIO, LiveAllocations, fragmented_ratio, idle_seconds
from gpumond.diagnosis.diagnosis import Diagnosis, diagnose
from gpumond.diagnosis.patterns import Plateaus, pattern_of
from gpumond.facts.frame import Verdict
from gpumond.facts.program import Ending, Program
from gpumond.facts.snapshot import (
    DeviceReading,
    ProcessEnd,
    ProcessUsage,
    Reading,
    Sensors,
    Snapshot,
    SourceState,
    XidErrors,
)
from gpumond.tick.history import Series
from gpumond.tick.observe import observe
from tests.helpers.agents import GIB
from tests.helpers.curves import (
    MIB,
    MINUTE,
    SIZE,
    Curve,
    at_moment,
    by_agent,
    by_device,
    by_process,
    each_onset,
    first,
    kinds,
    last,
    leaking,
    noisy,
    of_device,
    onsets,
    steps_of,
)
from tests.helpers.values import make_device, make_pool, make_process, make_report, make_suspended


def at(found: list[tuple[float, Verdict]], kind: str) -> float | None:
    one = first(found, kind)
    return None if one is None else one[0]


def test_pressure_begins_with_the_first_snapshot_above_95_percent():
    found = onsets(by_device(lambda at: (0.5 if at < 100 else 0.96) * SIZE, steps_of(3)))
    assert at(found, "pressure") == 100.0


def test_memory_that_the_driver_reserves_is_not_free():
    reserved = SIZE / 50
    found = last(by_device(lambda at: 0.96 * SIZE, steps_of(3), reserved_bytes=int(reserved)))
    (pressure,) = (verdict for verdict in found if verdict.kind == "pressure")
    assert dict(pressure.evidence)["free_bytes"] == pytest.approx(0.04 * SIZE - reserved, abs=2)


def test_leak_fills_what_the_driver_does_not_reserve():
    def left(**fields: int) -> float:
        found = [
            each
            for each in last(by_process(leaking(300 * MIB, onset=12), steps_of(60), **fields))
            if each.kind == "leak"
        ]
        return found[0].time_to_full_seconds or 0.0

    assert left() - left(reserved_bytes=3000 * MIB) == pytest.approx(600, rel=0.1)


def test_pressure_begins_during_a_ramp_and_clears_below_93_percent():
    ramp = onsets(by_device(lambda at: min(1.0, 0.3 + at / 1000) * SIZE, steps_of(12)))
    assert 500 < (at(ramp, "pressure") or 0) < 650
    clearing = by_device(lambda at: (0.96 if at < 200 else 0.94 if at < 300 else 0.92) * SIZE, steps_of(6))
    found = [verdict for verdict in last(clearing) if verdict.kind == "pressure"]
    assert found == []


def test_pressure_requires_a_ramp_of_more_than_one_step():
    """A program that loads its model: 60 GiB at once, and little before and after."""
    levels = (0.1, 0.11, 0.81, 0.85)
    found = onsets(by_device(lambda at: levels[min(3, max(0, int((at - 60) / 15)))] * SIZE, steps_of(4, every=15.0)))
    assert "pressure" not in kinds(found)


def snapshots_of_a_killed_program(left: tuple[ProcessUsage, ...] = (), busy: float = 0.0) -> Iterator[Snapshot]:
    for moment in steps_of(20):
        if moment < 10 * MINUTE:
            yield at_moment(moment, of_device(30 * GIB, (make_process(10, 30 * GIB - MIB, comm="train"),)))
        else:
            yield at_moment(moment, of_device(30 * GIB, left, busy=busy))


@pytest.mark.parametrize(
    ("left", "pid", "words"),
    [
        ((), None, "belongs to no visible process (unchanged"),
        (
            (make_process(10, 30 * GIB - MIB, start_ticks=None, state="gone", comm="train"),),
            10,
            "that belonged to train (pid 10), which has exited",
        ),
        ((make_process(77, None, kinds=("holder",), comm="loader"),), None, "loader (pid 77) has the GPU open"),
    ],
)
def test_orphan_begins_a_minute_after_the_program_has_ended(
    left: tuple[ProcessUsage, ...], pid: int | None, words: str
):
    found = onsets(snapshots_of_a_killed_program(left))
    orphan = first(found, "orphan")
    assert orphan is not None
    assert 11 * MINUTE <= orphan[0] <= 11 * MINUTE + 2
    assert orphan[1].pid == pid
    assert words in orphan[1].summary
    assert "memory-freed" not in kinds(found)


def test_orphan_next_to_a_busy_program_takes_longer():
    found = onsets(snapshots_of_a_killed_program((make_process(11, GIB),), busy=0.9))
    assert 15 * MINUTE < (at(found, "orphan") or 0) < 16 * MINUTE


@pytest.mark.parametrize("busy", [None, 0.3])
def test_orphan_requires_known_utilization_and_constant_memory(busy: float | None):
    def snapshots() -> Iterator[Snapshot]:
        for moment in steps_of(20):
            moving = (moment % 40) * 20 * MIB if busy else 0
            yield at_moment(moment, of_device(int(30 * GIB + moving), (), busy=busy))

    assert "orphan" not in kinds(onsets(snapshots()))


def test_orphan_requires_a_process_list():
    assert "orphan" not in kinds(onsets(by_device(lambda at: 30 * GIB, steps_of(10), busy=0.0)))


def test_idle_holder_runs_nothing_for_half_an_hour():
    found = onsets(by_process(lambda at: 30 * GIB, steps_of(40), busy=0.0))
    idle = first(found, "idle-holder")
    assert idle is not None
    assert 30 * MINUTE <= idle[0] <= 31 * MINUTE
    assert idle[1].pid == 10
    assert "idle-holder" not in kinds(onsets(by_process(lambda at: GIB, steps_of(40), busy=0.0)))


@pytest.mark.parametrize(("every", "found"), [(30.0, True), (120.0, True), (300.0, False)])
def test_idle_holder_requires_a_reading_every_two_minutes(every: float, found: bool):
    holder = by_device(lambda at: 10 * GIB, steps_of(60, every), busy=0.0)
    assert ("idle-holder" in kinds(onsets(holder))) is found


def test_idle_holder_is_the_pool_of_a_process_that_the_driver_does_not_count():
    report = make_report(10, (make_pool(live=0, cached=30 * GIB),))
    uncounted = of_device(31 * GIB, (make_process(10, None),), busy=0.0)
    idle = first(each_onset(at_moment(at, uncounted, reports=(report,)) for at in steps_of(32)), "idle-holder")
    assert idle is not None
    assert (idle[1].pid, dict(idle[1].evidence)["held_bytes"]) == (10, 30 * GIB)


def test_idle_holder_uses_the_idle_time_of_the_reading():
    found = onsets(by_process(lambda at: 30 * GIB, steps_of(5), idle_seconds=4000.0))
    assert "idle-holder" in kinds(found)


def test_suspended_program_has_no_verdict():
    def idle(at: float) -> Snapshot:
        return next(by_process(lambda _: 30 * GIB, (at,), busy=0.0))

    suspended = (make_suspended(10, 30 * GIB),)
    later = (40 * MINUTE + at for at in steps_of(5))
    hidden = (at_moment(at, of_device(0, (), busy=0.0), suspended_programs=suspended) for at in later)
    assert {verdict.kind for verdict in last(map(idle, steps_of(40)))} >= {"idle-holder", "steady"}
    assert last(chain(map(idle, steps_of(40)), hidden)) == ()


def snapshots_of_an_end(before: float, **fields: object) -> list[tuple[float, Verdict]]:
    def snapshots() -> Iterator[Snapshot]:
        for moment in steps_of(12):
            if moment < 600:
                size = int(before if moment > 500 else 20 * GIB)
                yield at_moment(moment, of_device(size, (make_process(10, size, comm="train"),)))
            else:
                yield at_moment(moment, of_device(0, ()), **fields)

    return onsets(snapshots())


def test_crash_when_the_device_was_full_and_no_verdict_otherwise():
    crash, ended = snapshots_of_an_end(0.999 * SIZE), snapshots_of_an_end(40 * GIB)
    assert at(crash, "crash") == 600.0
    assert "memory-freed" not in kinds(crash)
    assert not kinds(ended) & {"crash", "memory-freed"}


def test_release_by_an_existing_process_does_not_report_its_end():
    def snapshots() -> Iterator[Snapshot]:
        for moment in steps_of(12):
            size = 40 * GIB if moment < 600 else 0
            pools = (make_pool(live=size),) if size else ()
            yield at_moment(moment, of_device(size, ()), reports=(make_report(10, pools),))

    (release,) = [verdict for _, verdict in onsets(snapshots()) if verdict.kind == "memory-freed"]
    assert release.summary == "train (pid 10) freed 40.0 GiB on GPU 0"
    assert dict(release.evidence)["released_bytes"] == 40 * GIB


def test_memory_that_is_freed_after_a_failed_allocation_is_so_described_though_the_agent_reports_it_later():
    def snapshots() -> Iterator[Snapshot]:
        for moment in steps_of(12):
            size = 40 * GIB if moment < 600 else GIB
            report = make_report(10, (make_pool(live=size, ooms=int(moment > 600)),))
            yield at_moment(moment, of_device(size, (make_process(10, size),)), reports=(report,))

    (release,) = [verdict for _, verdict in onsets(snapshots()) if verdict.kind == "memory-freed"]
    assert release.summary == "train (pid 10) freed 39.0 GiB on GPU 0 after an allocation failed"


def test_release_without_a_process_list_names_no_process():
    found = onsets(by_device(lambda moment: 40 * GIB if moment < 600 else 0, steps_of(12)))
    assert next(v.summary for _, v in found if v.kind == "memory-freed") == "40.0 GiB on GPU 0 was freed within seconds"


def test_crash_after_an_xid_error():
    found = snapshots_of_an_end(40 * GIB, xids=(XidErrors("GPU-a", 31, 1, 1e9 + 600),))
    assert "after an Xid error" in next(verdict.summary for _, verdict in found if verdict.kind == "crash")


def test_crash_after_a_failed_allocation():
    def snapshots() -> Iterator[Snapshot]:
        for moment in steps_of(12):
            if moment >= 600:
                yield at_moment(moment, of_device(0, ()))
                continue
            ooms = 1 if moment > 590 else 0
            report = make_report(10, (make_pool(live=20 * GIB, ooms=ooms),))
            yield at_moment(moment, of_device(21 * GIB, (make_process(10, 21 * GIB),)), reports=(report,))

    found = first(each_onset(snapshots()), "crash")
    assert found is not None
    assert "after an allocation failed" in found[1].summary


def snapshots_of_an_end_after_an_oom(ending: Ending | None, full: bool) -> list[tuple[float, Verdict]]:
    """Return snapshots in which the driver frees the memory after the agent's bye."""

    def snapshots() -> Iterator[Snapshot]:
        for moment in steps_of(12):
            if moment >= 600:
                yield at_moment(moment, of_device(0, ()))
                continue
            report = make_report(10, (make_pool(live=20 * GIB, ooms=int(moment > 560)),))
            used = int(0.99 * SIZE) if full else 21 * GIB
            reports = (report,) if moment <= 580 else ()
            ends = (ProcessEnd(10, 100, ending),) if ending and moment == 590 else ()
            yield at_moment(moment, of_device(used, (make_process(10, used),)), reports=reports, ends=ends)

    return onsets(snapshots())


@pytest.mark.parametrize(
    ("ending", "full", "kind"),
    [
        ("exit", False, set()),
        ("exit", True, set()),
        ("out-of-memory", False, {"crash"}),
        ("error", False, {"crash"}),
        (None, False, {"crash"}),
    ],
)
def test_crash_depends_on_the_reported_ending_first(ending: Ending | None, full: bool, kind: set[str]):
    found = snapshots_of_an_end_after_an_oom(ending, full)
    assert kinds(found) & {"crash", "memory-freed"} == kind
    for summary in (verdict.summary for _, verdict in found if verdict.kind == "crash"):
        assert ("probably" in summary) == (ending != "out-of-memory")


@pytest.mark.parametrize("ending", [None, "error"])
def test_crash_is_not_caused_by_a_handled_error(ending: Ending | None):
    def snapshots() -> Iterator[Snapshot]:
        for moment in steps_of(12):
            if moment >= 600:
                yield at_moment(moment, of_device(0, ()))
                continue
            program = Program(oom_retries=int(moment > 560), oom_recovered=int(moment > 580))
            report = make_report(10, (make_pool(live=20 * GIB, ooms=int(moment > 560)),), program=program)
            ends = (ProcessEnd(10, 100, ending),) if ending and moment == 590 else ()
            yield at_moment(moment, of_device(21 * GIB, (make_process(10, 21 * GIB),)), reports=(report,), ends=ends)

    assert not kinds(onsets(snapshots())) & {"crash", "memory-freed"}


@pytest.mark.parametrize("grows_at", [0.0, 500.0, None])
def test_crash_on_a_full_device_requires_growth_shortly_before_the_end(grows_at: float | None):
    """None: the device is full from the first reading."""

    def snapshots() -> Iterator[Snapshot]:
        for moment in steps_of(12):
            full = grows_at is None or moment > grows_at
            used = 0 if moment >= 600 else int((0.99 if full else 0.5) * SIZE)
            yield at_moment(moment, of_device(used, (make_process(10, used),) if used else ()))

    assert ("crash" in kinds(onsets(snapshots()))) == (grows_at == 500.0)


def test_crash_loop_is_three_crashes_within_an_hour():
    def snapshots(crashes: int) -> Iterator[Snapshot]:
        for moment in steps_of(50):
            turn, into = divmod(moment, 600)
            size = int(0.99 * SIZE if into > 500 else 20 * GIB)
            if turn < crashes and into < 550:
                process = make_process(10 + int(turn), size, start_ticks=int(turn), comm="train")
                yield at_moment(moment, of_device(size, (process,)))
            else:
                yield at_moment(moment, of_device(0, ()))

    loop = first(each_onset(snapshots(3)), "crash-loop")
    assert loop is not None
    assert (loop[0], loop[1].pid) == (1750.0, None)
    assert "crash-loop" not in kinds(onsets(snapshots(2)))


def test_crash_loops_are_counted_by_program():
    def program(moment: float, pid: int, comm: str) -> tuple[ProcessUsage, ...]:
        turn, into = divmod(moment, 600)
        size = int(0.99 * SIZE if into > 500 else 20 * GIB)
        return (make_process(pid + int(turn), size, start_ticks=int(turn), comm=comm),) if into < 550 else ()

    def snapshots() -> Iterator[Snapshot]:
        for moment in steps_of(33):
            there = [program(moment, 10, "train"), program(moment, 90, "serve")]
            devices = (
                replace(of_device(sum(p.used_bytes or 0 for p in own), own), uuid=uuid, index=index)
                for index, (uuid, own) in enumerate(zip(("GPU-a", "GPU-b"), there, strict=True))
            )
            yield replace(at_moment(moment, of_device(0, ())), devices=tuple(devices))

    loops = {verdict.summary.split()[0] for verdict in last(snapshots()) if verdict.kind == "crash-loop"}
    assert loops == {"train", "serve"}


def splitting(stranded_per_minute: float, retries: int | None = None) -> Iterator[Snapshot]:
    for moment in steps_of(60):
        live = int((60 if moment % 30 < 5 else 10) * GIB * 0.5)  # the peak of every step
        kept = int(30 * GIB + stranded_per_minute * moment / MINUTE)
        pool = make_pool(live=live, stranded=kept - live, retries=retries)
        process = make_process(10, kept + GIB)
        yield at_moment(moment, of_device(kept + GIB, (process,)), reports=(make_report(10, (pool,)),))


def test_fragmentation_is_judged_at_the_peak_and_only_if_it_grows():
    assert "fragmentation" not in kinds(onsets(splitting(0.0)))
    found = first(each_onset(splitting(GIB)), "fragmentation")
    assert found is not None
    evidence = dict(found[1].evidence)
    assert evidence["peak_live_bytes"] == 30 * GIB
    assert evidence["fragmentation_ratio"] == pytest.approx(1 - 30 * GIB / evidence["peak_kept_bytes"])
    assert found[1].pid == 10
    fragmented = next(
        each.taken_at
        for each in splitting(GIB)
        if fragmented_ratio(30 * GIB, (each.devices[0].used_bytes or 0) - GIB) > FRAGMENTED_RATIO
    )
    assert abs(found[1].since - fragmented) <= MINUTE, "not the program's start, when nothing was stranded"
    assert "leak" not in kinds(onsets(splitting(GIB)))


def test_fragmentation_that_a_program_has_freed_is_not_reported_again():
    """It frees all after 60 minutes, and then fills its pool without a gap."""
    before, after = list(splitting(GIB)), []
    for moment in steps_of(20):
        live = 0 if moment < 5 * MINUTE else int(min(60.0, moment / 10) * GIB)
        report = make_report(10, (make_pool(live=live, cached=60 * GIB - live),))
        device = of_device(61 * GIB, (make_process(10, 61 * GIB),))
        after.append(at_moment(60 * MINUTE + moment, device, reports=(report,)))
    assert [at for at, verdict in onsets([*before, *after]) if verdict.kind == "fragmentation" and at > 3600] == []
    assert "fragmentation" not in [verdict.kind for verdict in last([*before, *after])]


def test_fragmentation_of_a_pool_that_keeps_nothing_ends_at_once():
    emptied = make_report(10, (make_pool(live=0, cached=60 * GIB),))
    device = of_device(61 * GIB, (make_process(10, 61 * GIB),))
    after = [at_moment(60 * MINUTE + at, device, reports=(emptied,)) for at in range(1, 31)]
    assert "fragmentation" in [verdict.kind for verdict in last(splitting(GIB))]
    assert "fragmentation" not in [verdict.kind for verdict in last([*splitting(GIB), *after])]


def test_fragmentation_requires_live_bytes():
    """A pool that is stranded as a whole, as a log shows every cache."""
    for live, fragmented in ((GIB, True), (0, False)):
        pools = ((at, make_pool(live=live, stranded=0 if at < 20 * MINUTE else 30 * GIB)) for at in steps_of(40))
        found = onsets(
            at_moment(at, of_device(32 * GIB, (make_process(10, 32 * GIB),)), reports=(make_report(10, (pool,)),))
            for at, pool in pools
        )
        assert ("fragmentation" in kinds(found)) is fragmented


def test_fragmentation_excludes_cache_that_a_flush_returns():
    assert "fragmentation" not in kinds(onsets(by_agent(lambda at: GIB, lambda at: 40 * GIB, steps_of(40))))


@pytest.mark.parametrize(
    ("curve", "kind"),
    [
        (lambda at: 30 * GIB, "steady"),
        (noisy(lambda at: (30 + 6 * ((at // 20) % 2)) * GIB, 16 * MIB), "churn"),
        (lambda at: (30 if at < 30 * MINUTE else 45) * GIB, "step-change"),
        (lambda at: (30 + 10 * (at % (8 * MINUTE) < 2 * MINUTE)) * GIB, "periodic"),
    ],
    ids=["steady", "churn", "step-change", "periodic"],
)
def test_pattern_of_each_curve(curve, kind: str):
    verdicts = last(by_process(curve, steps_of(40)))
    assert [verdict.kind for verdict in verdicts if verdict.pid == 10] == [kind]


def test_warm_up_is_the_pattern_of_the_first_minutes():
    assert [v.kind for v in last(by_process(lambda at: 30 * GIB, steps_of(4))) if v.pid == 10] == ["warm-up"]


def patterns_over(curve: Curve, minutes: float) -> list[tuple[float, str | None]]:
    """Return the pattern of the process after each minute."""
    diagnosis, found = Diagnosis(), []
    for snapshot in by_process(curve, steps_of(minutes)):
        diagnosis = diagnose(diagnosis, snapshot)
        active = [verdict.kind for verdict in diagnosis.verdicts if verdict.pid == 10]
        if snapshot.elapsed_seconds % MINUTE == 0:
            found.append((snapshot.elapsed_seconds / MINUTE, active[0] if active else None))
    return found


def test_a_program_that_is_steady_since_its_start_is_steady_after_its_first_five_minutes():
    found = dict(patterns_over(lambda at: 30 * GIB, 8))
    assert [found[minute] for minute in (2.0, 5.0, 6.0)] == ["warm-up", "warm-up", "steady"]


def test_the_text_of_warm_up_is_true_of_a_program_that_is_steady():
    (warm_up,) = (v for v in last(by_process(lambda at: 30 * GIB, steps_of(5))) if v.pid == 10)
    assert warm_up.summary == "train (pid 10) is warming up: its memory hasn't been steady for long enough to judge"


def test_steady_ends_in_the_minute_in_which_the_curve_leaves_it():
    found = dict(patterns_over(lambda at: (30 if at < 20 * MINUTE else 36 if at < 21.5 * MINUTE else 42) * GIB, 24))
    assert (found[20.0], found[22.0]) == ("steady", None)


@pytest.mark.parametrize("loading", [0.0, 40.0], ids=["at once", "after loading"])
@pytest.mark.parametrize("per_minute", [100 * MIB, 300 * MIB, 1500 * MIB])
def test_pattern_of_linear_growth_is_neither_warm_up_nor_steady(loading: float, per_minute: float):
    def curve(moment: float) -> float:
        return min(1.0, moment / loading if loading else 1.0) * 2 * GIB + per_minute * moment / MINUTE

    later = [kind for minute, kind in patterns_over(noisy(curve, 2 * MIB), 13) if minute >= 6]
    assert set(later) <= {None, "growing", "leak"}


@pytest.mark.parametrize("minutes", [2, 4])
def test_warm_up_is_growth_that_slows_down(minutes: float):
    def curve(moment: float) -> float:
        return 40 * GIB * (1 - exp(-moment / (minutes * MINUTE)))

    assert {kind for minute, kind in patterns_over(curve, 8) if minute >= 2} == {"warm-up"}


UP = SourceState(name="nvml", up=True, responsive=True)


def last_snapshot(*devices: DeviceReading | None, every: float = 2.0) -> Snapshot:
    """Return the last of the snapshots of one device; None is a reading that did not arrive."""
    snapshot = None
    for number, device in enumerate(devices):
        reading = None if device is None else Reading(devices=(device,))
        snapshot = observe(snapshot, UP, reading, (), number * every, number * every)
    assert snapshot is not None
    return snapshot


def using(gpu: float | None, process: float | None = None, **fields: float) -> DeviceReading:
    sensors = Sensors(gpu_utilization_ratio=gpu, **fields)  # type: ignore[arg-type]
    return make_device(used_bytes=GIB, sensors=sensors, processes=(make_process(7, GIB, utilization_ratio=process),))


@pytest.mark.parametrize(
    ("readings", "seconds"),
    [
        ([using(0)], 0),
        ([using(0), using(0), using(0)], 4),
        ([using(0), using(0.01), using(0)], 2),
        ([using(0.5)], 0),
        ([using(None), using(None)], None),
        ([using(0), using(0), using(None), using(0)], 0),
        ([using(0), using(0), None, using(0)], 4),  # there was no reading for two of the six seconds
        ([using(0), using(0, decoder_utilization_ratio=0.2)], 0),
        ([using(0), using(0), None], 2),
    ],
)
def test_idle_time_of_a_device_counts_observed_seconds(readings: list[DeviceReading | None], seconds: float | None):
    (device,) = last_snapshot(*readings).devices
    assert device.idle_seconds == seconds


@pytest.mark.parametrize(
    ("readings", "seconds"),
    [
        ([using(0.9, 0), using(0.9, 0), using(0.9, 0)], 4),
        ([using(0.9, 0), using(0.9, 0.1), using(0.9, 0)], 2),
        ([using(0.9, 0.1)], 0),
        ([using(0.9), using(0.9)], None),
        ([using(0.0), using(0.0)], 2),  # nothing runs on the device, so the process is idle as well
        ([using(0.0), using(0.0), using(0.0, 0.0)], 4),
    ],
)
def test_idle_time_of_a_process_uses_its_own_and_its_devices(
    readings: list[DeviceReading | None], seconds: float | None
):
    (device,) = last_snapshot(*readings).devices
    (process,) = device.processes or ()
    assert idle_seconds(device, process) == seconds


def test_idle_time_of_a_reused_pid_starts_at_zero():
    first, second = (
        make_device(used_bytes=GIB, processes=(make_process(7, start_ticks=ticks, utilization_ratio=0.0),))
        for ticks in (100, 200)
    )
    (device,) = last_snapshot(first, first, second).devices
    assert [process.idle_seconds for process in device.processes or ()] == [0.0]


Number = Callable[[float], int | None]

BASE, PER_MINUTE, ONSET = 20 * GIB, 300 * MIB, 12.0
LIVE = leaking(PER_MINUTE, ONSET, BASE)
GROWING, LEAKING = ONSET + 4, ONSET + 7
"""Minutes at which the verdicts have been active for more than a minute."""


def kept(at: float) -> int:
    """Return the number of blocks of a program that keeps one of 5 MiB each second."""
    return 400 + int(LIVE(at) - BASE) // (5 * MIB)


def arena(at: float) -> int:
    return 400


def varying(at: float) -> int:
    """Return the number within steps that allocate a thousand blocks."""
    return 400 + 97 * (7 * int(at) % 11)


def unknown(at: float) -> None:
    return None


def seen(number: Number, minutes: float, second: Number | None = None) -> Iterator[Snapshot]:
    """Make snapshots of a leak; ``second``: the number of the allocations of another pool, which does not grow."""
    for at in steps_of(minutes):
        own = int(LIVE(at))
        pools = [make_pool(live=own, live_allocations=number(at))]
        if second is not None:
            pools.append(make_pool(live=GIB, allocator="cupy", live_allocations=second(at)))
        device = of_device(own + 3 * GIB, (make_process(10, own + 3 * GIB),))
        yield at_moment(at, device, reports=(make_report(10, tuple(pools)),))


def verdict_of(kind: str, snapshots: Iterator[Snapshot]) -> Verdict:
    return next(verdict for verdict in last(snapshots) if verdict.kind == kind)


@pytest.mark.parametrize(("kind", "minutes"), [("growing", GROWING), ("leak", LEAKING)])
def test_number_rises_with_memory_that_the_program_keeps(kind: str, minutes: float):
    verdict = verdict_of(kind, seen(kept, minutes))
    evidence = dict(verdict.evidence)
    assert evidence["live_allocations_per_minute"] == pytest.approx(60, abs=2)
    assert evidence.get("live_allocations_growth_ratio", inf) > 5, "not stated if it is very large"
    assert " more live allocations per minute)" in verdict.summary


@pytest.mark.parametrize(("kind", "minutes"), [("growing", GROWING), ("leak", LEAKING)])
def test_number_does_not_rise_with_an_arena_that_becomes_larger(kind: str, minutes: float):
    verdict = verdict_of(kind, seen(arena, minutes))
    evidence = dict(verdict.evidence)
    assert (evidence["live_allocations_per_minute"], evidence["live_allocations_growth_ratio"]) == (0.0, 0.0)
    assert "in a few large allocations)" in verdict.summary


@pytest.mark.parametrize(("number", "refused"), [(kept, True), (arena, False), (varying, False), (unknown, False)])
def test_larger_allocations_are_refused_if_the_number_rises(number: Number, refused: bool):
    leak = verdict_of("leak", seen(number, LEAKING))
    assert leak.fit is not None
    values = {each.kind: each.value for each in leak.fit.ruled_out}
    assert ("larger-allocations" in values) == refused


def test_number_does_not_affect_which_verdicts_are_found():
    found = [
        [(at, verdict.kind) for at, verdict in onsets(seen(number, LEAKING))]
        for number in (unknown, kept, arena, varying)
    ]
    assert "leak" in {kind for _, kind in found[0]}
    assert found[1:] == found[:1] * 3


def test_sentence_does_not_mention_a_number_that_varies_more_than_it_could_grow():
    leak = verdict_of("leak", seen(varying, LEAKING))
    assert "live_allocations_per_minute" in dict(leak.evidence)
    assert "allocations" not in leak.summary


@pytest.mark.parametrize("second", [None, unknown])
def test_number_is_unknown_unless_all_pools_count(second: Number | None):
    for kind, minutes in (("growing", GROWING), ("leak", LEAKING)):
        verdict = verdict_of(kind, seen(unknown if second is None else kept, minutes, second))
        assert not [name for name, _ in verdict.evidence if "allocations" in name]
        assert "allocations" not in verdict.summary


def test_numbers_of_several_pools_are_added():
    leak = verdict_of("leak", seen(kept, LEAKING, lambda at: int(at)))
    assert dict(leak.evidence)["live_allocations_per_minute"] == pytest.approx(120, abs=3)


def test_growth_is_that_since_the_verdict_began():
    allocations = LiveAllocations()

    def block(number: int | None, at: float) -> float | None:
        for sample in (number, None if number is None else number + 3):
            allocations.add(sample, is_new_block=False)
        allocations.add(None, is_new_block=True)
        found = allocations.growth(at, GIB + MIB * at, 1.0)
        return None if found is None else found.per_minute

    assert [block(10, 0.0), block(20, 15.0), block(None, 30.0)] == [None] * 3
    assert block(30, MINUTE) == 20.0
    allocations.reset()
    assert [block(90, 2 * MINUTE), block(90, 3 * MINUTE)] == [None, 0.0]


def test_pressure_is_not_reported_for_a_start():
    """A model of 50 GiB that is loaded in shards for 40 s, and an engine that then takes its cache."""
    shards: Curve = lambda at: (20 + 8 * min(6, max(0.0, at - 60) // 7)) * GIB  # noqa: E731
    assert "pressure" not in kinds(onsets(by_process(shards, steps_of(6))))
    engine: Curve = lambda at: min(0.9, 0.1 + at / 75) * SIZE  # noqa: E731
    assert "pressure" not in kinds(onsets(by_process(engine, steps_of(6))))


def test_pressure_is_not_reported_for_growth_that_slows_down():
    for seconds in (120, 240):
        warm_up: Curve = lambda at, tau=seconds: 0.86 * SIZE * (1 - exp(-at / tau))  # noqa: E731
        assert "pressure" not in kinds(onsets(by_device(warm_up, steps_of(25))))


def test_pressure_is_not_reported_for_the_start_of_a_second_program():
    def snapshots() -> Iterator[Snapshot]:
        for moment in steps_of(12):
            own = [make_process(10, 30 * GIB)]
            if moment > 400:
                own.append(make_process(11, int(36 * GIB * min(1.0, (moment - 400) / 80)), start_ticks=7))
            yield at_moment(moment, of_device(sum(one.used_bytes or 0 for one in own), tuple(own)))

    assert "pressure" not in kinds(onsets(snapshots()))


def test_pressure_is_reported_for_a_short_tooth_at_most_once():
    tooth: Curve = lambda at: (0.5 + 0.34 * (at % 340) / 340) * SIZE  # noqa: E731
    found = [at for at, verdict in onsets(by_process(tooth, steps_of(40))) if verdict.kind == "pressure"]
    assert all(at < 2 * 340 for at in found)


def test_pressure_is_not_reported_for_a_tooth_that_was_returned_before():
    tooth: Curve = lambda at: (0.5 + 0.35 * (at % 1200) / 1200) * SIZE  # noqa: E731
    found = [at for at, verdict in onsets(by_process(tooth, steps_of(80))) if verdict.kind == "pressure"]
    assert all(at < 1200 for at in found)


def test_end_of_a_small_program_on_a_device_that_another_one_fills_is_no_crash():
    def snapshots() -> Iterator[Snapshot]:
        for moment in steps_of(12):
            large = int(min(75.9, 40 + moment / 10) * GIB)
            own = (make_process(10, large), make_process(20, 4 * GIB, start_ticks=7))
            used = own if moment < 600 else own[:1]
            yield at_moment(moment, of_device(sum(one.used_bytes or 0 for one in used), used))

    assert "crash" not in kinds(onsets(snapshots()))


def test_engine_that_is_restarted_soon_after_its_start_has_not_crashed():
    def snapshots() -> Iterator[Snapshot]:
        for moment in steps_of(6):
            turn, into = divmod(moment, 100)
            used = int(min(0.99, into / 40) * SIZE)
            yield at_moment(moment, of_device(used, (make_process(10 + int(turn), used, start_ticks=int(turn)),)))

    assert kinds(onsets(snapshots())).isdisjoint({"crash", "crash-loop"})


@pytest.mark.parametrize(("xid", "crashed"), [(79, True), (45, False), (63, False)])
def test_only_xid_errors_that_end_programs_make_a_crash(xid: int, crashed: bool):
    def snapshots() -> Iterator[Snapshot]:
        for moment in steps_of(5):
            xids = (XidErrors(device_uuid="GPU-a", xid=xid, count=1, last_seen_at=1e9),) if moment > 200 else ()
            processes = (make_process(10, 40 * GIB),) if moment < 210 else ()
            yield at_moment(moment, of_device(40 * GIB if processes else 0, processes), xids=xids)

    assert ("crash" in kinds(onsets(snapshots()))) == crashed


def test_end_after_an_error_that_the_program_handled_is_no_crash():
    def snapshots(handled: bool) -> Iterator[Snapshot]:
        for moment in steps_of(6):
            live = 20 * GIB if not handled or moment < 210 else 30 * GIB
            report = make_report(10, (make_pool(live=live, ooms=int(moment > 200)),))
            processes, reports = ((make_process(10, 40 * GIB),), (report,)) if moment < 270 else ((), ())
            yield at_moment(moment, of_device(40 * GIB if processes else 0, processes), reports=reports)

    assert "crash" in kinds(onsets(snapshots(handled=False)))
    assert "crash" not in kinds(onsets(snapshots(handled=True)))


def test_memory_that_no_process_of_this_container_owns_is_no_orphan():
    def snapshots(private: bool) -> Iterator[Snapshot]:
        for moment in steps_of(10):
            yield at_moment(moment, of_device(30 * GIB, (), busy=0.0), private_pid_namespace=private)

    assert "orphan" in kinds(onsets(snapshots(private=False)))
    assert "orphan" not in kinds(onsets(snapshots(private=True)))


def test_process_that_sleeps_has_freed_its_memory():
    found = onsets(by_process(lambda at: (70 if at < 600 else 1.2) * GIB, steps_of(12)))
    assert at(found, "memory-freed") == 600.0
    assert "crash" not in kinds(found)


def test_fragmentation_that_grows_for_hours_is_reported_and_that_of_the_start_is_not():
    def snapshots(per_hour: float) -> Iterator[Snapshot]:
        for moment in steps_of(360, 20.0):
            held = int((30 + per_hour * moment / 3600) * GIB)
            report = make_report(10, (make_pool(live=20 * GIB, stranded=held - 20 * GIB),))
            yield at_moment(moment, of_device(held, (make_process(10, held),)), reports=(report,))

    assert "fragmentation" in kinds(onsets(snapshots(1.0)))
    assert "fragmentation" not in kinds(onsets(snapshots(0.0)))


def test_a_minute_without_a_value_does_not_make_the_level_unknown():
    """A program of which no step ended in the last minute."""
    series = Series(1, 0.0, 0.0)
    for second in range(700):
        series.add((float(second), nan if second >= 590 else 8.0 * GIB))
    found = pattern_of(series, 0, 0.0, Plateaus(), 80.0 * GIB)
    assert found is not None
    assert (found.kind, dict(found.evidence)["level_bytes"]) == ("steady", 8.0 * GIB)
