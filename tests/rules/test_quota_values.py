"""Values of rules on limits and quotas of processes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpumond.facts.alerts import Rule
from gpumond.facts.program import PoolLimit
from gpumond.facts.quota import EffectiveQuota
from gpumond.facts.snapshot import CgroupLimit, ProcessQuota, Snapshot
from gpumond.features.rules.built_in import BUILT_IN
from tests.helpers.agents import GIB
from tests.helpers.values import TickState, advance, make_device, make_pool, make_process, make_report, make_snapshot

EXCEEDED = next(rule for rule in BUILT_IN if rule.name == "quota-exceeded")
UNAVAILABLE = next(rule for rule in BUILT_IN if rule.name == "reserve-unavailable")
POOLS = (make_pool(live=6 * GIB, cached=2 * GIB), replace(make_pool(live=GIB, cached=GIB), allocator="cupy"))


def snapshot(used: int | None = 12 * GIB, soft: int | None = 10 * GIB, *limits: PoolLimit) -> Snapshot:
    quota = EffectiveQuota(soft_limit_bytes=soft, soft_limit_quota="team" if soft else "")
    report = replace(make_report(42, POOLS), limits=limits)
    device = make_device(used_bytes=20 * GIB, processes=(make_process(42, used),))
    quotas = (ProcessQuota(pid=report.pid, start_ticks=report.start_ticks, quota=quota),)
    return replace(make_snapshot(device, reports=(report,)), quotas=quotas)


def reserving(
    free: int | None, *used: int | None, reserve: int = 20, missed_readings: int = 0, together: bool = False
) -> Snapshot:
    """Processes from pid 42 on, each with a quota of this reserve, or with one ``together``, and the memory that each
    uses; sizes in GiB."""
    processes = tuple(make_process(42 + n, None if size is None else size * GIB) for n, size in enumerate(used))
    free_bytes = None if free is None else free * GIB
    device = make_device(used_bytes=None, free_bytes=free_bytes, processes=processes, missed_readings=missed_readings)
    quotas = tuple(
        ProcessQuota(
            pid=each.pid,
            start_ticks=each.start_ticks,
            quota=EffectiveQuota(
                reserve_bytes=reserve * GIB, reserve_quota=f"team{'' if together or not number else number}"
            ),
        )
        for number, each in enumerate(processes)
    )
    return replace(make_snapshot(device), quotas=quotas)


def values(name: str, snapshot: Snapshot) -> list[float]:
    rule = Rule(name="any", scope="process", value=name, above=-1.0, match=(("pid", "42"),))
    return [alert.value for alert in advance(TickState(), [rule], snapshot).frame.alerts]


@pytest.mark.parametrize(
    ("used", "soft", "excess"),
    [(12, 10, [2 * GIB]), (10, 10, [0]), (12, None, [0]), (None, 10, [])],
)
def test_excess_over_the_soft_limit(used: int | None, soft: int | None, excess: list[float]):
    sizes = [None if size is None else size * GIB for size in (used, soft)]
    assert values("soft_limit_excess_bytes", snapshot(*sizes)) == excess


def test_alert_on_a_soft_limit_names_quota_process_and_both_sizes():
    (alert,) = advance(TickState(), [EXCEEDED], snapshot()).frame.alerts
    text = dict(alert.annotations)["summary"]
    for part in (
        "train (pid 42) on GPU 0",
        "uses 12.0 GiB, 2.0 GiB more than",
        "soft limit of the team quota (10.0 GiB)",
    ):
        assert part in text


def test_limit_is_the_lowest_and_its_ratio_that_of_the_fullest_pool():
    limits = PoolLimit("torch", "GPU-a", 16 * GIB), PoolLimit("cupy", "GPU-a", 8 * GIB)
    limited = snapshot(12 * GIB, None, *limits, PoolLimit("torch", "GPU-b", GIB))
    assert values("limit_bytes", limited) == [8 * GIB]
    assert values("limit_ratio", limited) == [0.5]


@pytest.mark.parametrize(("used", "ratio"), [(6, [0.75]), (2, [0.5]), (None, [0.5])])
def test_limit_of_the_cgroup_counts_like_that_of_a_pool(used: int | None, ratio: list[float]):
    size = None if used is None else used * GIB
    limits = CgroupLimit(cgroup="/pod", pids=(42,), limit_bytes=8 * GIB, used_bytes=size)
    limited = snapshot(12 * GIB, None, PoolLimit("torch", "GPU-a", 16 * GIB))
    limited = replace(limited, devices=(replace(limited.devices[0], cgroup_limits=(limits,)),))
    assert values("limit_bytes", limited) == [8 * GIB]
    assert values("limit_ratio", limited) == ratio


def test_process_without_a_limit_has_no_value():
    for name in ("limit_bytes", "limit_ratio"):
        assert values(name, snapshot()) == []


@pytest.mark.parametrize(
    ("snapshot", "shortage"),
    [
        (reserving(15, 5), [0]),
        (reserving(10, 5), [5 * GIB]),
        (reserving(0, 25), [0]),  # it uses more than its reserve
        (reserving(10, 5, 10), [15 * GIB]),  # the free memory serves both reserves
        (reserving(10, 15, 5), [5 * GIB]),  # at most the unused part of its own
        (reserving(10, 5, 2, together=True), [3 * GIB]),  # a quota has one reserve
        (reserving(0, 15, 10, together=True), [0]),
        (reserving(None, 5), []),
        (reserving(10, 5, missed_readings=1), []),
        (reserving(10, None), []),
        (replace(reserving(10, 5), quotas=()), [0]),
    ],
)
def test_shortage_of_a_reserve_is_the_part_that_is_neither_used_nor_free(snapshot: Snapshot, shortage: list[float]):
    assert values("reserve_shortage_bytes", snapshot) == shortage


def test_alert_on_a_reserve_names_quota_process_and_what_is_missing():
    rule = replace(UNAVAILABLE, for_seconds=0.0)
    (alert,) = advance(TickState(), [rule], reserving(10, 5)).frame.alerts
    text = dict(alert.annotations)["summary"]
    for part in ("pid 42", "5.0 GiB of the 20.0 GiB reserve of", "quota team", "taken by other programs"):
        assert part in text
