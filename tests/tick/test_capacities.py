"""Free, reserved and reclaimable memory of a device, and the memory of granted programs."""

from __future__ import annotations

from dataclasses import replace

from gpumond.facts.quota import EffectiveQuota, StoredAdmission
from gpumond.facts.snapshot import ProcessQuota, Snapshot
from gpumond.features.quotas.admissions import capacities, held_bytes_by_grant
from gpumond.serve.examples import DEVICE, GIB, POOL, PROCESS, REPORT, SNAPSHOT, UUID

OTHER = replace(PROCESS, pid=10, start_ticks=5, uid=1001, used_bytes=4 * GIB)
SMALL = replace(
    REPORT, pid=10, start_ticks=5, uid=1001, workload="small", pools=(replace(POOL, held_bytes=3 * GIB),), admission="a"
)
NEITHER = StoredAdmission(
    id="a",
    owner="",
    device_uuid=UUID,
    device_index=0,
    need_bytes=40 * GIB,
    grant_seconds=600.0,
    uid=None,
    pid=None,
    start_ticks=None,
    program_uid=None,
    deadline=600.0,
)


def snapshot(**fields: object) -> Snapshot:
    device = replace(DEVICE, processes=(PROCESS, OTHER), free_bytes=9 * GIB)
    return replace(SNAPSHOT, **{"devices": (device,), "reports": (REPORT, SMALL)} | fields)  # type: ignore[arg-type]


def reserve(gib: int, **fields: object) -> Snapshot:
    quota = EffectiveQuota(reserve_bytes=gib * GIB, reserve_quota="team")
    return snapshot(quotas=(ProcessQuota(pid=10, start_ticks=5, quota=quota),), **fields)


def test_memory_of_a_grant_is_that_of_its_process_and_of_agents_that_name_it():
    process = replace(NEITHER, pid=PROCESS.pid, start_ticks=PROCESS.start_ticks)
    assert held_bytes_by_grant(snapshot(), [replace(process, id="b")]) == {"b": 78 * GIB}
    assert held_bytes_by_grant(snapshot(), [NEITHER]) == {"a": 4 * GIB}
    assert held_bytes_by_grant(snapshot(), [replace(process, program_uid=1001)]) == {"a": 82 * GIB}
    assert held_bytes_by_grant(snapshot(), [replace(NEITHER, id="c")]) == {}


def test_agent_of_another_user_cannot_name_a_grant():
    assert held_bytes_by_grant(snapshot(), [replace(NEITHER, program_uid=1000)]) == {}


def test_held_bytes_count_if_the_driver_does_not_list_the_process():
    device = replace(DEVICE, processes=None)
    assert held_bytes_by_grant(snapshot(devices=(device,)), [NEITHER]) == {"a": 3 * GIB}


def test_device_without_a_current_reading_has_unknown_room():
    for device in (
        replace(DEVICE, missed_readings=1),
        replace(DEVICE, up=False),
        replace(DEVICE, free_bytes=None, used_bytes=None),
    ):
        (capacity,) = capacities(snapshot(devices=(device,)), (), "all")
        assert capacity.free_bytes is None
    (capacity,) = capacities(snapshot(devices=(replace(DEVICE, free_bytes=None),)), (), "all")
    assert capacity.free_bytes == (80 - 78 - 1) * GIB  # what the driver reserves isn't free


def test_unused_part_of_a_reserve_is_kept_and_lent_by_the_same_user_only():
    (capacity,) = capacities(reserve(10), (), "user")
    assert (capacity.free_bytes, capacity.unused_reserve_bytes, capacity.flushable_users) == (
        9 * GIB,
        6 * GIB,
        frozenset({1001}),
    )
    assert capacities(reserve(10), (), "all")[0].flushable_users is None
    assert capacities(reserve(3), (), "user")[0].unused_reserve_bytes == 0


def test_grant_and_reserve_of_one_program_count_once():
    assert capacities(reserve(10), [replace(NEITHER, need_bytes=8 * GIB)], "user")[0].unused_reserve_bytes == 2 * GIB


def test_processes_of_one_quota_share_its_reserve_which_the_device_bounds():
    quota = EffectiveQuota(reserve_bytes=90 * GIB, reserve_quota="team")
    both = tuple(ProcessQuota(pid=each.pid, start_ticks=each.start_ticks, quota=quota) for each in (PROCESS, OTHER))
    assert capacities(snapshot(quotas=both), (), "user")[0].unused_reserve_bytes == (90 - 78 - 4) * GIB
    huge = tuple(replace(each, quota=replace(quota, reserve_bytes=900 * GIB)) for each in both)
    assert capacities(snapshot(quotas=huge), (), "user")[0].unused_reserve_bytes == DEVICE.size_bytes


def test_neighbors_are_the_programs_that_allow_a_flush_and_can_return_memory():
    assert [each.workload for each in capacities(snapshot(), (), "all")[0].neighbors] == ["train", "small"]
    never = replace(REPORT, flush_policy="never")
    assert [each.workload for each in capacities(snapshot(reports=(never, SMALL)), (), "user")[0].neighbors] == [
        "small"
    ]
    assert capacities(snapshot(), (), "off")[0].neighbors == ()
    assert [each.workload for each in capacities(snapshot(), [NEITHER], "all")[0].neighbors] == ["train"]


def test_memory_within_the_reserve_of_a_neighbor_is_not_reclaimable():
    kept = {each.workload: each.reclaimable_bytes for each in capacities(reserve(3), (), "all")[0].neighbors}
    assert kept["small"] == GIB
