"""Events between two frames."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpumond.events import Event, EventLog
from gpumond.facts.alerts import as_past
from gpumond.facts.frame import Alert, Verdict
from gpumond.facts.pools import ExpectedRelease, Receipt
from gpumond.facts.program import Oom, Program
from gpumond.facts.quota import GrantedRequest, QueuedRequest
from gpumond.facts.snapshot import Fault, XidErrors
from gpumond.facts.suspension import MemoryHolder, SuspendedMemory, SuspendedProgram, SuspensionReceipt
from tests.helpers.agents import GIB
from tests.helpers.values import make_device, make_pool, make_process, make_report
from tests.tick.frames import UUID, between, make_frame


def make_receipt(**fields: Any) -> Receipt:
    defaults: dict[str, Any] = {
        "pid": 10,
        "workload": "train",
        "device_uuid": UUID,
        "allocator": "torch",
        "outcome": "freed",
        "reason": "",
        "expected": ExpectedRelease(GIB, GIB, GIB),
        "released_bytes": GIB,
        "driver_released_bytes": GIB,
        "before": None,
        "after": None,
        "steps": (),
        "raced": False,
        "requested_by": "token@10.0.0.7",
        "started_at": 999_990.0,
        "duration_seconds": 0.5,
    }
    return Receipt(**defaults | fields)


def test_events_of_two_equal_frames_are_empty():
    leak = Verdict(device_uuid=UUID, pid=10, start_ticks=100, kind="leak", since=1.0)
    frame = make_frame(
        reports=(make_report(pools=(make_pool(ooms=1),)),), xids=(XidErrors(UUID, 79, 1, 5.0),), verdicts=(leak,)
    )
    assert between(frame, frame) == []


def test_agent_connects_and_disconnects():
    frame = make_frame(reports=(make_report(pools=(make_pool(live=GIB),)),))
    (came,) = between(make_frame(), frame)
    assert (came.kind, came.pid, came.workload, came.at) == ("agent-connected", 10, "train", 1_000_000.0)
    assert came.summary == "train (pid 10) connected: torch 2.13.0"
    (gone,) = between(frame, make_frame())
    assert (gone.kind, gone.details) == ("agent-disconnected", (("held_bytes", GIB),))


def test_end_of_a_process_is_an_event():
    process = make_process(10, 2 * GIB, comm="train")
    frame, gone = make_frame(make_device(processes=(process,))), make_frame(make_device(processes=()))
    crash = Verdict(device_uuid=UUID, pid=10, start_ticks=100, kind="crash", since=1.0)
    (event,) = between(frame, gone)
    assert (event.kind, event.device_uuid, event.pid, event.start_ticks) == ("process-ended", UUID, 10, 100)
    assert event.summary == "train (pid 10) has exited; it used 2.0 GiB on GPU 0"
    assert event.details == (("held_bytes", 2 * GIB),)
    for other in (
        make_frame(make_device(processes=None)),
        make_frame(make_device(processes=(), missed_readings=1)),
        make_frame(make_device("GPU-b", processes=())),
        make_frame(make_device(processes=()), reports=(make_report(),)),
        make_frame(make_device(processes=()), verdicts=(crash,)),
    ):
        assert "process-ended" not in {event.kind for event in between(frame, other)}
    assert between(make_frame(make_device(processes=(make_process(10, None),))), gone) == []


def test_end_of_a_process_names_the_workload_of_its_agent():
    device = make_device(processes=(make_process(10, 2 * GIB, comm="python3"),))
    connected = make_frame(device, reports=(make_report(),))
    (event,) = between(connected, make_frame(device), make_frame(make_device(processes=())))
    assert (event.workload, event.summary) == ("train", "train (pid 10) has exited; it used 2.0 GiB on GPU 0")


REQUEST = QueuedRequest(
    id="a",
    device_uuid=UUID,
    need_bytes=16 * GIB,
    available_bytes=GIB,
    missing_bytes=15 * GIB,
    ahead=0,
    user="ann",
    workload="pretrain",
    pid=7,
    since=999_940.0,
    holders=(MemoryHolder(10, "train", 9 * GIB),),
)
GRANT = GrantedRequest(
    id="a", device_uuid=UUID, need_bytes=16 * GIB, unused_bytes=16 * GIB, user="ann", workload="pretrain", pid=7
)


def test_request_that_waits_and_is_granted_makes_two_events():
    empty = make_frame()
    waiting, granted = replace(empty, queue=(REQUEST,)), replace(empty, grants=(GRANT,))
    (wait,) = between(empty, waiting)
    assert (wait.kind, wait.device_uuid, wait.pid, wait.workload) == ("wait", UUID, 7, "pretrain")
    assert (
        wait.summary
        == "pretrain (pid 7) is waiting for 16.0 GiB on GPU 0; GPU 0's largest program is train (pid 10, 9.0 GiB)"
    )
    assert wait.details == (("request", "a"), ("need_bytes", 16 * GIB), ("user", "ann"), ("occurred_at", REQUEST.since))
    (grant,) = between(waiting, granted)
    assert (grant.kind, grant.device_uuid, grant.pid) == ("grant", UUID, 7)
    assert grant.summary == "pretrain (pid 7) was granted 16.0 GiB of GPU 0 after 1 min"
    assert grant.details[-1] == ("waited_seconds", 60.0)
    assert between(waiting, waiting) == between(granted, granted) == []
    asks = replace(empty, queue=(replace(REQUEST, since=999_998.5),))
    assert between(empty, asks) == [], "as a resumption that doesn't wait"
    assert between(asks, waiting) == [wait]


def test_suspension_and_resumption_make_events_with_the_program_that_waited():
    memory = (SuspendedMemory(UUID, 0, 9 * GIB),)
    program = SuspendedProgram(
        id="10-100", pid=10, start_ticks=100, uid=1, workload="lab", state="suspended", since=1.0, memory=memory
    )
    receipt = SuspensionReceipt(
        action="suspend",
        pid=10,
        start_ticks=100,
        workload="lab",
        outcome="suspended",
        requested_by="uid:0",
        requested_for="pretrain (pid 7)",
        started_at=999_990.0,
        expected_bytes=9 * GIB,
        released_bytes=9 * GIB,
    )
    runs, rests = make_frame(), make_frame(suspended_programs=(program,))
    (event,) = between(runs, rests, suspensions=(receipt,))
    assert (event.kind, event.device_uuid, event.pid, event.workload) == ("suspend", UUID, 10, "lab")
    assert (
        event.summary
        == "lab (pid 10, 9.0 GiB) on GPU 0 was suspended by gpumond for pretrain (pid 7), requested by root"
    )
    assert ("requested_for", "pretrain (pid 7)") in event.details
    back = replace(receipt, action="resume", outcome="resumed", requested_by="SIGCONT", requested_for="")
    (event,) = between(rests, runs, suspensions=(back,))
    assert (event.kind, event.device_uuid) == ("resume", UUID)
    assert event.summary == "lab (pid 10, 9.0 GiB) on GPU 0 was resumed by the program's user (SIGCONT)"


def test_agent_of_a_program_that_never_used_a_device_makes_no_event():
    worker = make_frame(reports=(make_report(uses_device=False),))
    assert between(make_frame(), worker) == []
    assert between(worker, make_frame()) == []
    assert [event.kind for event in between(worker, make_frame(reports=(make_report(),)))] == ["agent-connected"]


def test_reused_pid_is_another_agent():
    first, second = make_frame(reports=(make_report(),)), make_frame(reports=(make_report(start_ticks=200),))
    assert {event.kind for event in between(first, second)} == {"agent-connected", "agent-disconnected"}


def test_device_lost_and_device_back_are_one_event_each():
    fault = Fault("nvml", "gpu_is_lost", UUID, "GPU is lost")
    well, ill = make_frame(), make_frame(make_device(UUID, up=False), faults=(fault,))
    (lost,) = between(well, ill)
    assert (lost.kind, lost.device_uuid, lost.summary) == ("device-lost", UUID, "GPU 0 can't be read: GPU is lost")
    assert between(well, ill, ill) == []
    (back,) = between(well, ill, ill, well)
    assert (back.kind, back.device_uuid) == ("device-back", UUID)
    assert between(well, ill, well, well) == []


def test_device_that_is_no_longer_listed_is_lost_and_may_return():
    both, one = make_frame(make_device(UUID), make_device("GPU-b")), make_frame(make_device(UUID))
    assert [(event.kind, event.device_uuid) for event in between(both, one)] == [("device-lost", "GPU-b")]
    assert [(event.kind, event.device_uuid) for event in between(both, one, both)] == [("device-back", "GPU-b")]
    assert between(one, both) == []


def test_xid_errors_are_counted():
    before, after = make_frame(xids=(XidErrors(UUID, 31, 1, 5.0),)), make_frame(xids=(XidErrors(UUID, 31, 3, 7.0),))
    (event,) = between(before, after)
    assert (event.kind, event.at) == ("xid", 1_000_000.0)
    assert event.details == (("xid", 31), ("count", 2), ("occurred_at", 7.0))


def test_flushes_make_events_and_plans_do_not():
    receipts = [
        make_receipt(),
        make_receipt(outcome="planned"),
        make_receipt(outcome="refused", allocator=None, reason="busy"),
    ]
    freed, refused = between(make_frame(), receipts=receipts)
    assert (freed.kind, freed.at, dict(freed.details)["released_bytes"]) == ("flush", 1_000_000.0, GIB)
    assert freed.summary == "flush of train (pid 10) on GPU 0 by token@10.0.0.7: freed, torch released 1.0 GiB"
    assert refused.summary == "flush of train (pid 10) on GPU 0 by token@10.0.0.7: refused (busy)"


def test_alerts_fire_and_resolve():
    labels = (("alertname", "leak"), ("pid", "10"), ("uuid", UUID), ("workload", "train"))
    alert = Alert(
        rule="leak",
        phase="firing",
        labels=labels,
        annotations=(("summary", "it leaks"),),
        value=3.5,
        active_at=999_900.0,
        fired_at=999_960.0,
    )
    fired, resolved = between(make_frame(), raised=[alert], resolved=[alert])
    assert (fired.kind, fired.at, fired.device_uuid, fired.pid, fired.workload) == (
        "alert-fired",
        1_000_000.0,
        UUID,
        10,
        "train",
    )
    assert (fired.summary, resolved.summary) == ("it leaks", "leak resolved; the alert was: it leaks")
    assert dict(fired.details)["rule"] == "leak"
    (over,) = between(make_frame(), resolved=[as_past(alert, "ended at 00:00:01 UTC")])
    assert over.summary == "leak ended at 00:00:01 UTC; the alert was: it leaks"


def test_alert_without_a_summary_names_program_pid_and_device():
    labels = (("alertname", "hog"), ("gpu", "3"), ("pid", "10"), ("uuid", UUID), ("workload", "train"))
    (fired,) = between(
        make_frame(),
        raised=[
            Alert(
                rule="hog",
                phase="firing",
                labels=labels,
                annotations=(),
                value=3.5,
                active_at=999_900.0,
                fired_at=999_960.0,
            )
        ],
    )
    assert fired.summary == "hog: train (pid 10) on GPU 3"


@pytest.mark.parametrize(
    ("kind", "has_events"), [("leak", True), ("fragmentation", True), ("steady", False), ("warm-up", False)]
)
def test_verdicts_begin_and_end(kind: str, has_events: bool):
    verdict = Verdict(
        device_uuid=UUID,
        pid=10,
        start_ticks=100,
        kind=kind,
        since=999_000.0,
        evidence=(("slope_bytes_per_second", 2.0),),
        time_to_full_seconds=None,
        summary="train leaks",
    )
    without, with_it = make_frame(reports=(make_report(),)), make_frame(reports=(make_report(),), verdicts=(verdict,))
    began, ended = between(without, with_it), between(with_it, without)
    assert [event.kind for event in (*began, *ended)] == (["verdict-began", "verdict-ended"] if has_events else [])
    if has_events:
        assert (began[0].at, began[0].workload) == (1_000_000.0, "train")
        assert began[0].summary == "train leaks (since 13:30:00 UTC)"
        assert dict(began[0].details) == {"verdict": kind, "since": 999_000.0, "slope_bytes_per_second": 2.0}
        assert ended[0].summary == f"{kind} ended: train (pid 10) on GPU 0"


def test_verdict_end_names_program_pid_and_device_after_the_process_has_ended():
    verdict = Verdict(device_uuid=UUID, pid=10, start_ticks=100, kind="fragmentation", since=999_999.5)
    with_agent = make_frame(reports=(make_report(),), verdicts=(verdict,))
    listed = make_frame(make_device(UUID, processes=(make_process(10, comm="python"),)), verdicts=(verdict,))
    for before, name in ((with_agent, "train"), (listed, "python")):
        (ended,) = [event for event in between(before, make_frame()) if event.kind == "verdict-ended"]
        assert ended.summary == (f"fragmentation ended: {name} (pid 10) on GPU 0, because the process has exited")
    (of_device,) = between(make_frame(verdicts=(replace(verdict, pid=None),)), make_frame())
    assert of_device.summary == "fragmentation ended: GPU 0"


def test_events_are_in_the_order_of_their_times():
    verdicts = tuple(
        Verdict(device_uuid=UUID, pid=None, start_ticks=None, kind=kind, since=at)
        for kind, at in (("leak", 999_000.0), ("orphan", 999_990.0))
    )
    report = make_report(program=Program(ooms=(Oom(number=1, at=999_000.5, seen="scope"),)))
    frames = [
        (make_frame(reports=(make_report(),)), ()),
        (make_frame(reports=(report,), taken_at=1_000_001.0), [make_receipt()]),
        (make_frame(reports=(report,), verdicts=verdicts, taken_at=1_000_002.0), [make_receipt(started_at=990_000.0)]),
    ]
    ring, events = EventLog(0.0), list[Event]()
    for frame, receipts in frames:
        for receipt in receipts:
            ring.add_receipt(receipt)
        events += ring.publish(frame)
    assert len(events) == 6
    assert [event.at for event in events] == sorted(event.at for event in events)


def test_ids_increase_by_one_also_over_a_restart():
    ring = EventLog(started_at=1000.5, capacity=3)
    frames = [make_frame(reports=tuple(make_report(pid) for pid in range(10, 10 + count))) for count in (2, 3, 5)]
    batches = [ring.publish(frame, (), ()) for frame in frames]
    assert [event.id for batch in batches for event in batch] == [
        1_000_001,
        1_000_002,
        1_000_003,
        1_000_004,
        1_000_005,
    ]
    assert [event.id for event in ring.newest()] == [1_000_003, 1_000_004, 1_000_005]
    assert [event.id for event in ring.after(1_000_004)] == [1_000_005]
    assert ring.before_id == 1_000_002
    assert EventLog(started_at=1001.5).last_id > ring.last_id


def test_receipt_is_an_event_of_the_next_frame_once():
    ring = EventLog(0.0)
    ring.add_receipt(make_receipt())
    assert [event.kind for event in ring.publish(make_frame(), (), ())] == ["flush"]
    assert ring.publish(make_frame(), (), ()) == ()
