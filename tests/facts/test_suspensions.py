"""Suspended processes, recognized by the driver's lists and by the reports of agents."""

from __future__ import annotations

import pytest

from gpumond.facts.snapshot import AgentReport, DeviceReading, Fault, Reading, Snapshot, SourceState
from gpumond.tick.ledger import make_ledger
from gpumond.tick.observe import observe
from gpumond.tick.reading_conditions import conditions
from tests.helpers.agents import GIB
from tests.helpers.values import make_device, make_pool, make_process, make_report

UP = SourceState(name="nvml", up=True, responsive=True)
OTHER = make_process(20, GIB)
LISTED = make_device(used_bytes=11 * GIB, processes=(OTHER, make_process(10, 10 * GIB)))
UNLISTED = make_device(used_bytes=GIB, processes=(OTHER,))
HIDDEN = make_device(used_bytes=11 * GIB, processes=(OTHER,))
"""The driver's list lacks the process, and its memory is still used."""
POOL = make_pool(live=8 * GIB, cached=GIB)
EMPTY = make_pool()


def after(
    steps: list[tuple[DeviceReading | None, AgentReport | None]],
    faults: tuple[Fault, ...] = (),
    silent_from: int = 1000,
) -> Snapshot:
    """Return the last of the snapshots of some seconds. ``silent_from``: the second from which the agent is silent."""
    snapshot = None
    for second, (device, report) in enumerate(steps):
        reading = None if device is None else Reading(devices=(device,), faults=faults if second else ())
        reports = () if report is None else (report,)
        silent = (said(age=float(second)),) if second >= silent_from else ()
        at = float(second)
        snapshot = observe(snapshot, UP, reading, reports, taken_at=at, elapsed_seconds=at, silent=silent)
    assert snapshot is not None
    return snapshot


def said(age: float = 0.1, pool: object = POOL) -> AgentReport:
    return make_report(pools=(pool,), age_seconds=age)  # type: ignore[arg-type]


def test_process_that_leaves_the_list_and_whose_agent_still_states_its_pools_is_suspended():
    snapshot = after([(LISTED, said()), (UNLISTED, said()), (UNLISTED, said())])
    (report,) = snapshot.reports
    assert report.suspended
    assert report.pools == (make_pool(unmapped_bytes=9 * GIB),)
    assert snapshot.faults == ()
    ledger = make_ledger(snapshot)
    assert (sum(line.used_bytes for line in ledger.lines), ledger.overcounts[0].overcount_bytes) == (GIB, 0)
    detail = "pid 10 (train): 9.0 GiB in its allocators; the driver counted 10.0 GiB before"
    assert [each for each in conditions(snapshot) if each.kind == "suspended"] == [("GPU-a", "suspended", detail)]


def test_process_whose_agent_is_silent_is_suspended_after_three_seconds():
    steps = [(LISTED, said()), *((UNLISTED, said(age=0.5 + second)) for second in range(1, 60))]
    assert not after(steps[:3]).reports[0].suspended
    assert after(steps[:5]).reports[0].suspended
    assert after(steps).reports[0].suspended


def test_process_whose_agent_was_silent_before_the_driver_stopped_to_list_it_is_suspended():
    steps = [(LISTED, said()), *[(LISTED, None)] * 20, *[(UNLISTED, None)] * 2]
    assert after(steps).suspensions == ()
    snapshot = after(steps, silent_from=16)
    assert [(report.suspended, report.pools[0].unmapped_bytes) for report in snapshot.reports] == [(True, 9 * GIB)]
    assert after(steps[:-2], silent_from=16).reports == ()


def test_only_process_of_the_machine_can_be_suspended():
    alone = make_device(used_bytes=10 * GIB, processes=(make_process(10, 10 * GIB),))
    snapshot = after([(alone, said()), *[(make_device(), said())] * 4])
    assert snapshot.reports[0].suspended
    assert sum(line.used_bytes for line in make_ledger(snapshot).lines) == 0


def test_resumed_process_has_its_pools_again():
    snapshot = after([(LISTED, said()), *[(UNLISTED, said())] * 3, (LISTED, said(age=30.0))])
    assert snapshot.suspensions == ()
    assert snapshot.reports == (said(age=30.0),)


def test_memory_that_is_being_restored_is_that_of_the_process():
    """The driver counts the memory as used for some seconds before it lists the process."""
    snapshot = after([(LISTED, said()), *[(UNLISTED, said())] * 3, *[(HIDDEN, said(age=5.0))] * 5])
    (report,) = snapshot.reports
    assert (report.suspended, report.pools, snapshot.faults) == (True, (POOL,), ())
    ledger = make_ledger(snapshot)
    sizes = {(line.share, line.pid): line.used_bytes for line in ledger.lines if line.used_bytes}
    expected = {("opaque", 20): GIB, ("live", 10): 8 * GIB, ("cached", 10): GIB, ("unattributed", None): GIB}
    assert (sizes, ledger.overcounts[0].overcount_bytes) == (expected, 0)


def test_device_that_does_not_answer_changes_no_suspension():
    steps = [(LISTED, said()), *[(UNLISTED, said())] * 3, (None, said())]
    assert after(steps).reports[0].suspended


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([(LISTED, said()), *[(UNLISTED, said(pool=EMPTY))] * 2], id="it has closed its context"),
        pytest.param([(LISTED, said()), *[(HIDDEN, said())] * 8], id="its memory is still used"),
        pytest.param([(UNLISTED, said())] * 8, id="the driver has never listed it"),
        pytest.param([(LISTED, said()), *[(UNLISTED, None)] * 8], id="it has ended"),
    ],
)
def test_process_is_not_suspended(steps: list[tuple[DeviceReading | None, AgentReport | None]]):
    snapshot = after(steps)
    assert snapshot.suspensions == ()
    assert not any(report.suspended for report in snapshot.reports)


def test_incomplete_list_suspends_nothing():
    faults = (Fault("nvml", "processes_hidden", "GPU-a", "for a test"),)
    snapshot = after([(LISTED, said()), *[(UNLISTED, said())] * 4], faults)
    assert not snapshot.reports[0].suspended


def test_false_claim_of_a_process_without_memory_remains_a_fault():
    snapshot = after([(UNLISTED, said())] * 3)
    assert [fault.kind for fault in snapshot.faults] == ["report_exceeds_driver"]


def test_claim_is_no_fault_while_the_count_of_the_driver_changes():
    counts = [make_device(used_bytes=n * GIB, processes=(make_process(10, n * GIB),)) for n in (10, 8, 6, 4, 2)]
    pool = make_pool(live=9 * GIB, private_bytes=0)
    assert after([(device, said(pool=pool)) for device in counts]).faults == ()
    at_rest = after([(device, said(pool=pool)) for device in (*counts, counts[-1], counts[-1])])
    assert [fault.kind for fault in at_rest.faults] == ["report_exceeds_driver"]
