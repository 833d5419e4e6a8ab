"""Plans in virtual time, as a daemon would observe them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest

from gpumond.facts.pools import PoolUsage
from gpumond.facts.snapshot import Snapshot
from gpumond.facts.units import GIB, MIB
from gpumond.features.loadgen.plan import SCENARIOS, LoadPlan, plan
from gpumond.features.loadgen.scenario_builder import CONTEXT_BYTES
from gpumond.tick.ledger import make_ledger
from tests.helpers.simulated_snapshots import EPOCH, snapshots

QUIET = {"noise": 0, "gaps": 0, "neighbors": 0, "view": "agent"}


def pools(made: LoadPlan, every: float = 10.0) -> Iterator[tuple[float, PoolUsage]]:
    for snapshot in snapshots(made, every):
        for report in snapshot.reports:
            if report.workload == "load":
                yield snapshot.taken_at - EPOCH, report.pools[0]


@pytest.mark.parametrize("name", SCENARIOS)
def test_ledgers_of_each_scenario_add_up(name: str):
    made = plan(name, 1, duration="1h", view="process" if name != "fragmentation" else "agent", noise=0)
    for snapshot in snapshots(made, 60.0):
        for device, overcount in zip(snapshot.devices, make_ledger(snapshot).overcounts, strict=True):
            assert device.used_bytes is not None
            assert device.size_bytes is not None
            assert 0 <= device.used_bytes <= device.size_bytes
            assert overcount.overcount_bytes < 4 * MIB * (1 + len(device.processes or ()))


@pytest.mark.parametrize("name", ["leak-linear", "fleet", "crash"])
def test_snapshots_of_a_plan_are_deterministic(name: str):
    made = plan(name, 2, duration="30m")
    assert list(snapshots(made)) == list(snapshots(made))


def test_two_plans_can_run_at_the_same_time():
    made = plan("leak-linear", 0, duration="1h", **QUIET)
    twin = made.without_fault()
    assert twin is not None
    assert made.expected_verdict.injected_at is not None
    for ours, theirs in zip(snapshots(made, 30.0), snapshots(twin, 30.0), strict=True):
        if ours.taken_at - EPOCH < made.expected_verdict.injected_at:
            assert ours == theirs
    assert ours != theirs


def test_held_bytes_are_a_maximum_of_whole_segments_until_a_flush():
    made = plan("periodic-eval", 0, duration="1h", period="10m", step="8GiB", **QUIET)
    found = list(pools(made, 1.0))
    assert all(pool.live_bytes <= pool.held_bytes and pool.held_bytes % (2 * MIB) == 0 for _, pool in found)
    assert all(pool.held_bytes == pool.live_bytes + pool.reclaimable.likely + pool.stranded_bytes for _, pool in found)
    flushes = [step.at for step in made.steps if step.action == "flush"]
    assert flushes
    for at in flushes:
        before = next(pool for moment, pool in found if moment >= at - 1.0)
        after = next(pool for moment, pool in found if moment >= at)
        assert before.held_bytes - after.held_bytes >= 7 * GIB


def test_fragmentation_strands_more_bytes_at_constant_live_bytes():
    made = plan("fragmentation", 0, neighbors=0, gaps=0)
    found = list(pools(made))
    early, late = found[len(found) // 20][1], found[-1][1]
    assert made.expected_verdict.injected_at is not None
    assert late.held_bytes > 1.5 * late.live_bytes
    assert late.stranded_bytes > 15 * GIB > early.stranded_bytes
    peaks = (late.peak_live_bytes or 0) / (late.peak_held_bytes or 1)
    assert 0.5 < peaks < 0.7
    twin = made.without_fault()
    assert twin is not None
    last = list(pools(twin))[-1][1]
    assert (last.peak_live_bytes or 0) / (last.peak_held_bytes or 1) > 0.95


def test_slow_fragmentation_is_limited_and_live_bytes_are_constant():
    made = plan("slow-fragmentation", 0, step="1.6GiB", over="15h", gaps=0)
    found = [pool for _, pool in pools(made, 60.0)][1:]
    early, late = found[:25], found[-60:]
    assert max(pool.stranded_bytes for pool in early) < 2 * MIB
    for pool in late:
        assert pool.stranded_bytes == pytest.approx(4 * GIB, abs=2 * MIB)
    assert min(pool.live_bytes for pool in late) - min(pool.live_bytes for pool in early) < 512 * MIB


@pytest.mark.parametrize("seed", range(3))
def test_program_ends_when_the_truth_says_that_the_device_is_full(seed: int):
    made = plan("leak-linear", seed, rate="512MiB", duration="6h", **QUIET)
    assert made.expected_verdict.oom_at is not None
    assert made.expected_verdict.injected_at is not None
    died = max(at for at, _ in pools(made))
    assert made.expected_verdict.oom_at == pytest.approx(
        died, abs=0.05 * (made.expected_verdict.oom_at - made.expected_verdict.injected_at)
    )


def last(made: LoadPlan) -> Snapshot:
    return list(snapshots(made, 30.0))[-1]


@pytest.mark.parametrize(
    ("kind", "listed"),
    [("unlisted", []), ("gone", [("gone", None, ("compute",))]), ("holder", [("alive", 1, ("holder",))])],
)
def test_orphan_is_used_memory_without_a_running_process(kind: str, listed: list[tuple[str, int | None, object]]):
    made = plan("orphan", 1, gaps=0, neighbors=0, noise=0, **{"as": kind, "view": "agent"})
    end = last(made)
    (device,) = end.devices
    assert end.reports == ()
    assert device.used_bytes is not None
    assert device.used_bytes > 3 * GIB
    assert device.sensors.gpu_utilization_ratio == 0
    found = [(p.state, p.start_ticks and 1, p.kinds) for p in device.processes or ()]
    assert found == listed
    twin = made.without_fault()
    assert twin is not None
    assert last(twin).devices[0].used_bytes == 0


def test_crash_is_on_a_nearly_full_device_and_a_new_pid_follows():
    made = plan("crash", 3, times=2, **QUIET)
    lives = {}
    brim = {}
    for snapshot in snapshots(made):
        (device,) = snapshot.devices
        for process in device.processes or ():
            lives.setdefault(process.pid, (process.start_ticks, snapshot.taken_at - EPOCH))
            brim[process.pid] = device.used_bytes
    assert len(lives) == 2
    assert all((used or 0) > 0.99 * made.size_bytes for used in brim.values())
    assert len({ticks for ticks, _ in lives.values()}) == 2


@pytest.mark.parametrize("view", ["agent", "process", "device"])
def test_view_limits_the_visible_facts(view: str):
    made = plan("steady", 0, duration="10m", view=view, noise=0, neighbors=0)
    end = last(made)
    (device,) = end.devices
    assert bool(end.reports) == (view == "agent")
    assert (device.processes is None) == (view == "device")
    if view == "process":
        assert device.processes is not None
        assert abs((device.processes[0].used_bytes or 0) - (device.used_bytes or 0)) <= 2 * MIB
    assert (device.used_bytes or 0) > CONTEXT_BYTES


def test_samples_and_hours_are_missing_as_planned():
    made = plan("leak-irregular", 0, gaps=1, duration="6h")
    times = [snapshot.taken_at - EPOCH for snapshot in snapshots(made)]
    pauses = [later - earlier for earlier, later in pairwise(times)]
    short = [pause for pause in pauses if 1.5 < pause < 60]
    (outage,) = [pause for pause in pauses if pause > 60]
    assert 30 * 60 <= outage <= 60 * 60 + 10
    assert all(5.0 <= pause <= 8.0 for pause in short)
    assert len(short) == pytest.approx(5 * 3600 / 41, rel=0.15)
    whole = [snapshot.seq for snapshot in snapshots(plan("leak-irregular", 0, gaps=0, duration="1h"))]
    assert len(whole) == 3601


def test_noise_has_the_planned_size():
    made = plan("preallocated", 0, duration="3h", noise="300MiB", view="process", neighbors=0, gaps=0)
    used = [snapshot.devices[0].used_bytes or 0 for snapshot in snapshots(made)][100:]
    mean = sum(used) / len(used)
    deviation = (sum((value - mean) ** 2 for value in used) / len(used)) ** 0.5
    assert deviation == pytest.approx(300 * MIB, rel=0.05)
    assert all(value % (2 * MIB) == 0 for value in used)


def test_neighbors_start_and_end_without_an_agent():
    made = plan("steady", 0, duration="3h", neighbors=1, view="agent")
    numbers = [len(snapshot.devices[0].processes or ()) for snapshot in snapshots(made, 30.0)]
    assert {1, 2} <= set(numbers)
    assert {report.workload for snapshot in snapshots(made, 60.0) for report in snapshot.reports} == {"load"}


def test_fleet_has_devices_of_its_own_with_equal_curves():
    made = plan("fleet", 0, programs=2, view="process", gaps=0, noise=0)
    pairs = [
        (one.used_bytes or 0, two.used_bytes or 0)
        for one, two in (snapshot.devices for snapshot in snapshots(made, 600.0))
    ]
    ones, twos = zip(*pairs[2:], strict=True)
    mean_one, mean_two = sum(ones) / len(ones), sum(twos) / len(twos)
    covariance = sum((a - mean_one) * (b - mean_two) for a, b in zip(ones, twos, strict=True))
    spread = (sum((a - mean_one) ** 2 for a in ones) * sum((b - mean_two) ** 2 for b in twos)) ** 0.5
    assert covariance / spread > 0.9
    assert max(ones) - min(ones) > 6 * GIB
