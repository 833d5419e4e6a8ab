"""Claims of agents that exceed the driver's count or the size of a device."""

from __future__ import annotations

from typing import Any

import pytest

from gpumond.facts.pools import PoolUsage
from gpumond.facts.snapshot import AgentReport, DeviceReading, Reading, Snapshot, SourceState
from gpumond.tick.ledger import make_ledger
from gpumond.tick.observe import observe
from gpumond.tick.reading_conditions import conditions
from tests.helpers.agents import GIB
from tests.helpers.values import make_device, make_pool, make_process, make_report

UP = SourceState(name="nvml", up=True, responsive=True)


def snapshot_after(
    previous: Snapshot | None, reading: Reading | None, reports: tuple[AgentReport, ...] = (), seconds: float = 1.0
) -> Snapshot:
    elapsed = (previous.elapsed_seconds if previous else 0.0) + seconds
    return observe(previous, UP, reading, reports, taken_at=1.0, elapsed_seconds=elapsed)


def reading_of(*devices: DeviceReading) -> Reading:
    return Reading(devices=devices)


def test_pool_larger_than_its_device_is_limited_to_the_size_and_a_condition():
    fits, large = make_pool(live=GIB), make_pool(allocator="cupy", live=81 * GIB, unmapped_bytes=99 * GIB)
    snapshot = snapshot_after(None, reading_of(make_device(used_bytes=GIB)), (make_report(pools=(fits, large)),))
    assert snapshot.reports[0].pools == (
        fits,
        make_pool(allocator="cupy", live=80 * GIB, unmapped_bytes=80 * GIB),
    )
    assert snapshot.faults == ()
    detail = "pid 10 (train): cupy claims 99.0 GiB, but the GPU has 80.0 GiB: counted as 80.0 GiB"
    assert list(conditions(snapshot)) == [("GPU-a", "pool_exceeds_device", detail)]
    others = make_process(20, GIB)
    unlisted = snapshot_after(None, reading_of(make_device(processes=(others,))), (make_report(pools=(fits, large)),))
    assert list(conditions(unlisted)) == []


def asleep(ticks: int, *pools: PoolUsage, counted: int = 3 * GIB, **fields: Any) -> Snapshot:
    """Return the snapshot after some ticks in which the driver counts less than these pools hold."""
    reading = reading_of(make_device(used_bytes=2 * counted, processes=(make_process(10, counted),)))
    snapshot = None
    for _ in range(ticks):
        snapshot = snapshot_after(snapshot, reading, (make_report(pools=pools, **fields),))
    assert snapshot is not None
    return snapshot


def test_lasting_excess_over_the_drivers_count_is_unmapped():
    pool = make_pool(live=10 * GIB, cached=GIB, stranded=GIB, live_allocations=7)
    second, third = asleep(2, pool), asleep(3, pool)
    assert second.reports[0].pools == (pool,)
    assert list(conditions(second)) == []
    expected = make_pool(live=GIB, cached=GIB, stranded=GIB, unmapped_bytes=9 * GIB)
    assert third.reports[0].pools == (expected,)
    detail = (
        "pid 10 (train): the allocators claim 12.0 GiB, but the driver counts 3.0 GiB: 9.0 GiB is estimated to be "
        "unmapped"
    )
    assert list(conditions(third)) == [("GPU-a", "unmapped_estimated", detail)]
    assert second.faults == third.faults == ()
    lines = {line.share: line.used_bytes for line in make_ledger(third).lines if line.pid}
    assert lines == {"live": GIB, "cached": GIB, "stranded": GIB, "overhead": 0}
    awake = snapshot_after(
        third, reading_of(make_device(used_bytes=13 * GIB, processes=(make_process(10, 13 * GIB),))), third.reports[:0]
    )
    assert awake.excesses == ()


def test_memory_that_was_freed_after_the_last_report_is_not_unmapped():
    """Several readings within a second: the program's next report states what it has freed."""
    pools, reading = (make_pool(live=12 * GIB),), reading_of(make_device(processes=(make_process(10, 3 * GIB),)))
    snapshot = None
    for tick in range(1, 5):
        own = make_report(pools=pools, age_seconds=0.2 * tick)
        snapshot = snapshot_after(snapshot, reading, (own,), seconds=0.2)
        assert [pool.unmapped_bytes for pool in snapshot.reports[0].pools] == [None]
    for age, unmapped in ((0.1, None), (0.3, 9 * GIB)):
        snapshot = snapshot_after(snapshot, reading, (make_report(pools=pools, age_seconds=age),), seconds=0.2)
        assert [pool.unmapped_bytes for pool in snapshot.reports[0].pools] == [unmapped], "a report that repeats it"


def test_inference_outlasts_a_report_and_a_reading_that_are_late():
    pools = (make_pool(live=12 * GIB),)
    asleep_for_3 = asleep(3, *pools)
    for reading, age in (
        (reading_of(make_device(used_bytes=6 * GIB, processes=(make_process(10, 3 * GIB),))), 30.0),
        (None, 0.1),
    ):
        after = snapshot_after(asleep_for_3, reading, (make_report(pools=pools, age_seconds=age),))
        assert [pool.unmapped_bytes for pool in after.reports[0].pools] == [9 * GIB]
        assert after.excesses[0].ticks == 3


def test_excess_is_that_of_private_pools():
    private = make_pool(live=9 * GIB, private_bytes=8 * GIB)
    other = make_pool(allocator="cupy", live=2 * GIB, private_bytes=0)
    third = asleep(3, other, private, counted=4 * GIB)
    assert [(pool.live_bytes, pool.unmapped_bytes) for pool in third.reports[0].pools] == [
        (2 * GIB, None),
        (2 * GIB, 7 * GIB),
    ]
    inner = make_pool(allocator="inner", inside="torch", live=9 * GIB)
    third = asleep(3, inner, private, counted=4 * GIB)
    assert [pool.unmapped_bytes for pool in third.reports[0].pools] == [None, 5 * GIB]


@pytest.mark.parametrize(
    "pools",
    [
        (make_pool(live=40 * GIB, private_bytes=GIB),),
        tuple(make_pool(allocator=f"a{number}", live=79 * GIB) for number in range(8)),
    ],
)
def test_excess_that_private_pools_do_not_explain_is_a_fault(pools: tuple[PoolUsage, ...]):
    assert asleep(1, *pools).faults == ()
    for ticks in (2, 5):
        snapshot = asleep(ticks, *pools)
        assert [fault.kind for fault in snapshot.faults] == ["report_exceeds_driver"]
        assert snapshot.reports[0].pools == pools
        assert sum(line.used_bytes for line in make_ledger(snapshot).lines if line.pid) == 3 * GIB


def test_nothing_is_inferred_without_the_drivers_count_or_behind_an_mps_server():
    for process in (make_process(10, None), make_process(10, GIB, kinds=("mps",))):
        reading = reading_of(make_device(used_bytes=2 * GIB, processes=(process,)))
        snapshot = None
        for _ in range(4):
            snapshot = snapshot_after(snapshot, reading, (make_report(pools=(make_pool(live=12 * GIB),)),))
        assert snapshot is not None
        assert [pool.unmapped_bytes for pool in snapshot.reports[0].pools] == [None]


def test_claim_over_the_drivers_count_for_two_ticks_is_a_fault():
    counted = make_process(10, GIB)
    reading = reading_of(make_device(used_bytes=2 * GIB, processes=(counted, make_process(20, GIB))))
    honest = make_report(10, (make_pool(live=3 * GIB),))  # within the tolerance for different times of reading
    for false in (
        make_report(10, tuple(make_pool(allocator=f"a{number}", live=79 * GIB) for number in range(8))),
        make_report(66, (make_pool(live=5 * GIB),)),
    ):
        first = snapshot_after(None, reading, (honest, false))
        assert first.faults == ()  # the driver may have been read before
        second = snapshot_after(first, reading, (honest, false))
        assert [fault.kind for fault in second.faults] == ["report_exceeds_driver"]
        assert f"pid {false.pid} " in second.faults[0].detail
    grown = make_report(10, (make_pool(live=70 * GIB),))
    assert snapshot_after(snapshot_after(None, reading, (honest,)), reading, (grown,)).faults == ()
    stale = make_report(10, (make_pool(live=70 * GIB),), age_seconds=10.0)
    assert snapshot_after(snapshot_after(None, reading, (stale,)), reading, (stale,)).faults == ()


def test_claims_of_one_program_change_no_line_of_another():
    """A program that the driver lists can report any value."""
    processes = (make_process(10, GIB), make_process(20, 5 * GIB))
    reading = reading_of(make_device(used_bytes=10 * GIB, processes=processes))
    other = make_report(20, (make_pool(live=3 * GIB, cached=GIB),))
    for false in (
        make_pool(live=2**62, unmapped_bytes=2**62, private_bytes=2**62),
        make_pool(live=70 * GIB, unmapped_bytes=70 * GIB),
        make_pool(unmapped_bytes=2**63 - 1),
    ):
        snapshot = alone = None
        for _ in range(4):
            snapshot = snapshot_after(snapshot, reading, (make_report(10, (false,)), other))
            alone = snapshot_after(alone, reading, (other,))
        assert snapshot is not None
        assert alone is not None
        assert lines_of(snapshot, 20) == lines_of(alone, 20)
        assert lines_of(snapshot, None) == lines_of(alone, None)
        assert sum(line[1] for line in lines_of(snapshot, 10)) == GIB
        assert (snapshot.reports[0].pools[0].unmapped_bytes or 0) <= 80 * GIB


def lines_of(snapshot: Snapshot, pid: int | None) -> list[tuple[str, int]]:
    return [(line.share, line.used_bytes) for line in make_ledger(snapshot).lines if line.pid == pid]


def test_agents_of_a_uid_share_its_number_of_pools():
    pools = tuple(make_pool(allocator=f"a{number}", live=1) for number in range(20))
    reports = tuple(make_report(pid=10 + number, uid=1000, pools=pools) for number in range(64))
    other = make_report(pid=9, uid=1001, pools=pools)
    snapshot = snapshot_after(None, reading_of(make_device(used_bytes=GIB)), (*reports, other))
    *shared, kept = snapshot.reports
    assert kept.pools == pools
    for report in shared:
        assert [pool.allocator for pool in report.pools] == [*(f"a{number}" for number in range(16)), "other"]
        assert sum(pool.live_bytes for pool in report.pools) == 20


def test_uid_below_its_number_of_pools_keeps_them_all():
    pools = tuple(make_pool(allocator=f"a{number}", live=1) for number in range(32))
    reports = tuple(make_report(pid=10 + number, pools=pools) for number in range(32))
    assert snapshot_after(None, reading_of(make_device(used_bytes=GIB)), reports).reports == reports
