"""Gaps, clock changes and restarts between a curve and its verdicts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import chain, pairwise

import pytest

from gpumond.diagnosis.diagnosis import Diagnosis, diagnose
from gpumond.facts.frame import Verdict
from gpumond.facts.snapshot import AgentReport, Sensors, Snapshot, Suspension
from tests.helpers.agents import GIB
from tests.helpers.curves import (
    HOUR,
    MIB,
    MINUTE,
    at_moment,
    by_agent,
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
from tests.helpers.values import make_device, make_fault, make_pool, make_process, make_report, make_snapshot

pytestmark = pytest.mark.slow


def leaking_snapshots(minutes: float = 60) -> Iterator[Snapshot]:
    return by_process(noisy(leaking(64 * MIB, onset=20), 16 * MIB), steps_of(minutes))


@cache
def onsets_of_the_leak() -> list[tuple[float, Verdict]]:
    return onsets(leaking_snapshots())


def test_verdicts_depend_on_the_snapshots_alone():
    def active_verdicts() -> list[object]:
        diagnosis = Diagnosis()
        active: list[object] = []
        for snapshot in leaking_snapshots():
            diagnosis = diagnose(diagnosis, snapshot)
            active.append(diagnosis.verdicts)
        return active

    assert active_verdicts() == active_verdicts()


def test_repeated_and_late_snapshots_change_nothing():
    def twice() -> Iterator[Snapshot]:
        before = None
        for snapshot in leaking_snapshots():
            yield from (snapshot, snapshot)
            if before is not None:
                yield before
            before = snapshot

    assert onsets(twice()) == onsets_of_the_leak()


@pytest.mark.parametrize("step", [-7200.0, 86400.0])
def test_wall_clock_step_changes_no_verdict(step: float):
    def stepped() -> Iterator[Snapshot]:
        for snapshot in leaking_snapshots():
            late = snapshot.elapsed_seconds > 30 * MINUTE
            yield replace(snapshot, taken_at=snapshot.taken_at + step) if late else snapshot

    assert [(at, v.kind, v.evidence) for at, v in onsets(stepped())] == [
        (at, v.kind, v.evidence) for at, v in onsets_of_the_leak()
    ]


def test_verdict_keeps_its_onset_over_a_wall_clock_step():
    def stepped() -> Iterator[Snapshot]:
        for snapshot in leaking_snapshots(70):
            yield replace(snapshot, taken_at=snapshot.taken_at + (HOUR if snapshot.elapsed_seconds > 3000 else 0))

    straight = first(each_onset(leaking_snapshots(70)), "leak")
    leak = next(verdict for verdict in last(stepped()) if verdict.kind == "leak")
    assert straight is not None
    assert straight[0] < 3000
    assert leak.since == straight[1].since


@pytest.mark.parametrize("begin", [25, 40, 60])
def test_collector_outage_makes_no_verdict_and_hides_none(begin: int):
    gap = [at for at in steps_of(150, 5.0) if not begin * MINUTE < at < (begin + 45) * MINUTE]
    found = onsets(by_process(noisy(leaking(64 * MIB, onset=20), 16 * MIB), gap))
    assert "leak" in kinds(found)
    assert not kinds(found) & {"crash", "memory-freed", "orphan"}
    quiet = onsets(by_process(noisy(lambda at: 20 * GIB, 16 * MIB), gap))
    assert kinds(quiet) <= {"warm-up", "steady"}


def test_device_without_answer_ends_no_life():
    def snapshots() -> Iterator[Snapshot]:
        for snapshot in leaking_snapshots():
            at = snapshot.elapsed_seconds
            if 2400 <= at < 2430:
                missed = int(at - 2399)
                device = replace(snapshot.devices[0], missed_readings=missed)
                if missed >= 3:
                    device = replace(device, used_bytes=None, processes=None)
                yield replace(snapshot, devices=(device,), faults=(make_fault("GPU-a"),))
            else:
                yield snapshot

    found = onsets(snapshots())
    assert "memory-freed" not in kinds(found)
    assert [verdict.kind for _, verdict in found].count("leak") == 1


def test_restarted_process_is_another_life():
    """A reused pid isn't an exception: the leak of the earlier process does not count."""

    def snapshots() -> Iterator[Snapshot]:
        for at in steps_of(120, 2.0):
            again = at >= HOUR
            curve = leaking(100 * MIB, onset=80 if again else 15, base=10 * GIB)
            process = make_process(10, int(curve(at)), start_ticks=999 if again else 100, comm="train")
            yield at_moment(at, of_device(int(curve(at)), (process,)))

    found = [at for at, verdict in onsets(snapshots()) if verdict.kind == "leak"]
    assert len(found) == 2
    assert found[0] < HOUR < found[1] < 2 * HOUR


def test_replaced_device_starts_without_history():
    def snapshots() -> Iterator[Snapshot]:
        for snapshot in leaking_snapshots(80):
            if snapshot.elapsed_seconds > 40 * MINUTE:
                yield replace(snapshot, devices=(replace(snapshot.devices[0], uuid="GPU-b"),))
            else:
                yield snapshot

    diagnosis = Diagnosis()
    for snapshot in snapshots():
        diagnosis = diagnose(diagnosis, snapshot)
    assert set(diagnosis.history.devices) == {"GPU-b"}
    assert {verdict.device_uuid for verdict in diagnosis.verdicts} == {"GPU-b"}


def test_life_without_start_ticks_ends_when_its_memory_falls():
    """In logs a pid is all that is known: a fall to a third is another program."""

    def snapshots() -> Iterator[Snapshot]:
        for at in steps_of(125, 2.0):
            early, late = leaking(100 * MIB, onset=15, base=30 * GIB), leaking(100 * MIB, onset=75, base=10 * GIB)
            curve = early if at < HOUR else late
            yield at_moment(at, of_device(int(curve(at)), (make_process(10, int(curve(at)), start_ticks=None),)))

    assert [verdict.kind for _, verdict in onsets(snapshots())].count("leak") == 2


def test_agent_that_starts_late_or_disconnects_makes_no_verdict():
    with_agent = list(by_agent(leaking(64 * MIB, onset=20), lambda at: 40 * GIB, steps_of(90)))
    mixed = [replace(s, reports=()) if not 600 < s.elapsed_seconds < 4800 else s for s in with_agent]
    assert first(each_onset(mixed), "leak")


def test_growth_of_a_pool_with_unknown_live_bytes_is_that_of_the_drivers_count():
    """A pool of RMM that grows is a leak all the same, whether its agent counts or not."""

    def with_uncounted_pool(snapshot: Snapshot) -> Snapshot:
        pool = make_pool(allocator="rmm", live_bytes=None, held_bytes=GIB)
        return replace(snapshot, reports=(make_report(pools=(pool,)),))

    assert first(each_onset(leaking_snapshots()), "leak")
    assert first(each_onset(map(with_uncounted_pool, leaking_snapshots())), "leak")


@pytest.mark.parametrize("speedup", [1.0, 12.0])
def test_speedup_shortens_the_time_and_keeps_the_slope(speedup: float):
    def snapshots() -> Iterator[Snapshot]:
        times = (at / speedup for at in steps_of(50, speedup))
        return by_process(noisy(leaking(speedup * 64 * MIB, onset=20 / speedup), 4 * MIB), times)

    found = first(each_onset(snapshots(), speedup), "leak")
    assert found is not None
    at, leak = found
    assert at <= 50 * MINUTE / speedup
    assert dict(leak.evidence)["slope_bytes_per_second"] == pytest.approx(speedup * 64 * MIB / 60, rel=0.1)
    free = 60 * GIB - (at - 20 * MINUTE / speedup) * speedup * 64 * MIB / 60
    assert leak.time_to_full_seconds == pytest.approx(free / (speedup * 64 * MIB / 60), rel=0.1)
    assert leak.since == pytest.approx(1e9 + 20 * MINUTE / speedup, abs=180 / speedup)


def test_unknown_values_make_no_verdict():
    nothing = (at_moment(at, of_device(0, None)) for at in steps_of(2))
    unknown = (
        at_moment(200.0 + at, replace(of_device(0, None), used_bytes=None, size_bytes=None)) for at in steps_of(2)
    )
    sizeless = (replace(s, devices=(replace(s.devices[0], size_bytes=None),)) for s in leaking_snapshots())
    assert last(chain(nothing, unknown)) is not None
    found = first(each_onset(sizeless), "leak")
    assert found is not None
    assert found[1].time_to_full_seconds is None


def test_life_has_at_most_one_shape():
    shapes = {"warm-up", "steady", "churn", "periodic", "step-change"}
    diagnosis = Diagnosis()
    for snapshot in leaking_snapshots():
        diagnosis = diagnose(diagnosis, snapshot)
        active = [v.pid for v in diagnosis.verdicts if v.kind in shapes | {"leak"}]
        assert len(active) == len(set(active))


def test_mig_instances_are_judged_and_their_device_is_not():
    def snapshots() -> Iterator[Snapshot]:
        for at in steps_of(45):
            size = int(leaking(100 * MIB, onset=15)(at))
            process = make_process(10, size, comm="train")
            whole = of_device(size, (process,))
            part = of_device(size, (process,), uuid="MIG-1", parent_uuid="GPU-a", gpu_instance_id=1)
            yield at_moment(at, whole, part)

    assert [v.device_uuid for v in last(snapshots()) if v.kind == "leak"] == ["MIG-1"]


def kinds_with(*reports: AgentReport) -> set[tuple[str, int | None]]:
    """Return the verdicts after two minutes in which 40 GiB of the device have no owner."""
    idle = Sensors(gpu_utilization_ratio=0.0)
    device = make_device(used_bytes=41 * GIB, processes=(make_process(5, GIB),), sensors=idle)
    diagnosis = Diagnosis()
    for second in range(120):
        at = float(second)
        snapshot = make_snapshot(device, seq=second, taken_at=at, elapsed_seconds=at, reports=reports)
        diagnosis = diagnose(diagnosis, snapshot)
    return {(verdict.kind, verdict.pid) for verdict in diagnosis.verdicts}


def test_claim_of_an_unlisted_process_does_not_hide_memory_without_an_owner():
    assert ("orphan", None) in kinds_with()
    assert ("orphan", None) in kinds_with(make_report(66, (make_pool(live=40 * GIB),)))


def test_a_device_without_a_process_has_empty_pools_and_no_unknown_ones():
    """Else the medians of its first block are of different samples: nothing used, and 8 GiB of it live."""
    diagnosis = Diagnosis()
    for at in steps_of(2):
        live = 8 * GIB if at > 50 else 0
        process, report = make_process(10, live), make_report(10, (make_pool(live=live),))
        device = of_device(live, (process,) if live else ())
        diagnosis = diagnose(diagnosis, at_moment(at, device, reports=(report,) if live else ()))
    blocks = diagnosis.history.shares(("GPU-a", None), resolution=60.0)
    assert {(block.used, block.live) for block in blocks} == {(0, 0), (8 * GIB, 8 * GIB)}


def test_a_suspended_process_is_known_to_use_nothing():
    diagnosis, report = Diagnosis(), make_report(10, (make_pool(live=8 * GIB),))
    process = make_process(10, 8 * GIB)
    suspension = Suspension("GPU-a", process, 0, since=30.0, confirmed=True)
    for at in steps_of(2):
        suspended = 30 < at <= 90
        device = of_device(0, ()) if suspended else of_device(8 * GIB, (process,))
        about = {"suspensions": (suspension,)} if suspended else {"reports": (report,)}
        diagnosis = diagnose(diagnosis, at_moment(at, device, **about))
    points = diagnosis.history.shares(("GPU-a", process.key))
    assert [(point.used, point.live) for point in points] == [
        (0, None) if 30 < at <= 90 else (8 * GIB, 8 * GIB) for at in steps_of(2)
    ]
    assert max(later.at - point.at for point, later in pairwise(points)) <= 1
