from __future__ import annotations

from dataclasses import replace

import pytest

from gpumond.facts.alerts import Rule
from gpumond.facts.snapshot import AgentReport, DeviceReading, Reading, Snapshot, SourceState
from gpumond.tick.observe import observe
from tests.helpers.agents import GIB
from tests.helpers.values import (
    TickState,
    advance,
    make_device,
    make_fault,
    make_pool,
    make_process,
    make_report,
    make_snapshot,
)

UP = SourceState(name="nvml", up=True, responsive=True)
FULL = (
    Rule(name="full", scope="device", value="used_ratio", above=0.8, annotations=(("summary", "{value} is used"),)),
)


def snapshot_after(
    previous: Snapshot | None, reading: Reading | None, reports: tuple[AgentReport, ...] = ()
) -> Snapshot:
    return observe(previous, UP, reading, reports, taken_at=1.0, elapsed_seconds=1.0)


def reading_of(*devices: DeviceReading, **fields: object) -> Reading:
    return Reading(devices=devices, **fields)  # type: ignore[arg-type]


def test_device_without_answer_keeps_its_values_for_two_readings():
    both = reading_of(make_device("GPU-a", used_bytes=GIB), make_device("GPU-b", used_bytes=GIB))
    one = reading_of(make_device("GPU-b", used_bytes=2 * GIB), faults=(make_fault("GPU-a"),))
    snapshot = snapshot_after(None, both)
    history = []
    for _ in range(4):
        snapshot = snapshot_after(snapshot, one)
        silent, other = snapshot.devices
        assert other.used_bytes == 2 * GIB
        history.append((silent.missed_readings, silent.used_bytes))
        assert (silent.up, other.up) == (False, True)
    assert history == [(1, GIB), (2, GIB), (3, None), (4, None)]
    assert snapshot_after(snapshot, both).devices == both.devices


def test_devices_without_any_reading_become_unknown():
    snapshot = snapshot_after(None, reading_of(make_device(used_bytes=GIB)))
    ups = []
    for _ in range(3):
        snapshot = snapshot_after(snapshot, None)
        ups.append(snapshot.devices[0].up)
    assert ups == [True, True, False]
    assert (snapshot.devices[0].missed_readings, snapshot.devices[0].used_bytes, snapshot.devices[0].uuid) == (
        3,
        None,
        "GPU-a",
    )


def test_device_that_the_source_no_longer_lists_is_removed_at_once():
    snapshot = snapshot_after(None, reading_of(make_device("MIG-a")))
    assert snapshot_after(snapshot, reading_of()).devices == ()


def test_instance_of_a_lost_device_is_lost():
    parent, instance = make_device("GPU-a"), make_device("MIG-a", parent_uuid="GPU-a")
    snapshot = snapshot_after(
        snapshot_after(None, reading_of(parent, instance)), reading_of(faults=(make_fault("GPU-a"),))
    )
    assert [device.missed_readings for device in snapshot.devices] == [1, 1]


def test_pools_beyond_the_maximum_are_summed_by_device():
    pools = tuple(
        make_pool(uuid, live=1, cached=2, stranded=3, allocator=f"a{number}", ooms=number or None, live_allocations=2)
        for number in range(100)
        for uuid in ("GPU-a", "GPU-b")
    )
    inside = make_pool(live=1, allocator="inner", inside="a0")
    reading = reading_of(make_device("GPU-a", used_bytes=GIB), make_device("GPU-b", used_bytes=GIB))
    (report,) = snapshot_after(
        None, reading, (make_report(pools=(inside, *pools, make_pool("GPU-unknown", live=7))),)
    ).reports
    assert report.pools[:32] == pools[:32]
    rest = report.pools[32:]
    assert [(pool.allocator, pool.device_uuid) for pool in rest] == [("other", "GPU-a"), ("other", "GPU-b")]
    for pool in rest:
        assert (pool.live_bytes, pool.held_bytes, pool.stranded_bytes) == (84, 6 * 84, 3 * 84)
        assert (pool.reclaimable.low, pool.reclaimable.likely, pool.reclaimable.high) == (168, 168, 168)
        assert (pool.ooms, pool.live_allocations) == (sum(range(16, 100)), 168)
        assert pool.peak_live_bytes is None
    unknown = tuple(
        make_pool(live=1, allocator=f"a{number}", ooms=number or None, held_known=number < 50)
        for number in range(40, 0, -1)
    )
    (report,) = snapshot_after(
        None, reading, (make_report(pools=(*unknown, *unknown[:1], make_pool(allocator="b"))),)
    ).reports
    assert report.pools[-1].ooms is None
    managed = make_pool(live=9, allocator="managed", managed=True)
    (report,) = snapshot_after(None, reading, (make_report(pools=(*pools, managed)),)).reports
    assert [pool.live_bytes for pool in report.pools[32:]] == [84, 84]


def test_program_uses_a_device_once_it_held_memory_or_is_listed():
    empty, worker = make_report(pools=(make_pool(),)), make_report(20)
    unlisted, lists = reading_of(make_device()), reading_of(make_device(processes=(make_process(10, GIB),)))
    first = snapshot_after(None, unlisted, (empty, worker))
    assert [report.uses_device for report in first.reports] == [False, False]
    second = snapshot_after(first, lists, (empty, worker))
    assert [report.uses_device for report in second.reports] == [True, False]
    third = snapshot_after(second, unlisted, (empty, worker))
    assert [report.uses_device for report in third.reports] == [True, False]
    held = snapshot_after(third, unlisted, (make_report(20, (make_pool(live=1),)),))
    assert [report.uses_device for report in held.reports] == [True]


def test_raised_and_resolved_contain_only_changes():
    full, empty = make_snapshot(make_device(used_bytes=70 * GIB)), make_snapshot(make_device(used_bytes=GIB))
    first = advance(TickState(), FULL, full)
    second = advance(first.memory, FULL, full)
    third = advance(second.memory, FULL, empty)
    assert [len(tick.raised) for tick in (first, second, third)] == [1, 0, 0]
    assert [len(tick.resolved) for tick in (first, second, third)] == [0, 0, 1]
    assert second.frame.alerts[0].rule == "full"
    reasons = [dict(over.annotations)["summary"] for over in third.resolved + advance(first.memory, (), full).resolved]
    assert [reason.partition("; the alert was: ")[2] for reason in reasons] == ["88% is used"] * 2
    assert reasons[0].startswith("ended at ")
    assert reasons[1].startswith("the rule full was deleted or disabled;")


@pytest.mark.parametrize("missed", [1, 3])
def test_alert_on_an_unread_device_is_not_resolved(missed: int):
    device = make_device(used_bytes=70 * GIB)
    first = advance(TickState(), FULL, make_snapshot(device))
    unseen = replace(device, missed_readings=missed, used_bytes=None if missed > 2 else device.used_bytes)
    second = advance(first.memory, FULL, make_snapshot(unseen))
    assert second.resolved == ()
    assert second.frame.alerts == first.frame.alerts


def test_alert_on_a_process_of_an_unread_device_is_not_resolved():
    rule = (Rule(name="hog", scope="pool", value="held_bytes", above=GIB),)
    report = make_report(pools=(make_pool(live=2 * GIB),))
    first = advance(TickState(), rule, make_snapshot(make_device(), reports=(report,)))
    lost = make_device(missed_readings=3, size_bytes=None, used_bytes=None, processes=None)
    assert advance(first.memory, rule, make_snapshot(lost)).resolved == ()
    assert len(advance(first.memory, rule, make_snapshot(make_device())).resolved) == 1


@pytest.mark.parametrize(
    ("name", "uuids"),
    [("1", {"GPU-b1"}), ("GPU-a", {"GPU-a1"}), ("0000:1c:00.0", {"GPU-b1"}), ("GPU-", set()), ("7", set())],
)
def test_rule_matches_a_device_by_any_of_its_names(name: str, uuids: set[str]):
    devices = [
        make_device(uuid, index=index, pci_bus_id=f"00000000:1{letter}:00.0", used_bytes=79 * GIB)
        for index, (uuid, letter) in enumerate((("GPU-a1", "B"), ("GPU-b1", "C")))
    ]
    rule = replace(FULL[0], match=(("device", name),))
    alerts = advance(TickState(), (rule,), make_snapshot(*devices)).frame.alerts
    assert {dict(alert.labels)["uuid"] for alert in alerts} == uuids
