"""What is refused and why, what follows from the driver's state, and the plans of requests for memory."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from gpumond.facts.pools import PoolUsage
from gpumond.facts.program import ProcessKey
from gpumond.facts.quota import GrantedRequest
from gpumond.facts.snapshot import AgentReport, DeviceReading, ProcessUsage, Snapshot, SourceState, Suspension
from gpumond.facts.suspension import SuspendedMemory, SuspendedProgram
from gpumond.facts.units import GIB
from gpumond.features.quotas.admissions import Neighbor, reclaim_plan
from gpumond.features.suspend.checkpoint_process import (
    CHECKPOINTED,
    FAILED,
    LOCKED,
    RUNNING,
    CheckpointRequest,
    CheckpointResponse,
    carry_out,
)
from gpumond.features.suspend.decision import HostState, SuspendRequest, already_suspended, checkpoint_outcome, refusals
from gpumond.features.suspend.routes import ProgramTarget, nothing_to_resume
from gpumond.host.machine import read_start_ticks
from tests.helpers.values import make_pool, make_report

KEY = ProcessKey(10, 100)
USAGE = ProcessUsage(pid=10, start_ticks=100, used_bytes=61 * GIB, kinds=("compute",), idle_seconds=7200.0)
DEVICE = DeviceReading(
    uuid="GPU-a", index=0, vendor="nvidia", size_bytes=80 * GIB, used_bytes=61 * GIB, processes=(USAGE,)
)
SOURCE = SourceState(name="nvml", up=True, responsive=True, driver_version="580.159.04")
SNAPSHOT = Snapshot(seq=1, taken_at=0.0, elapsed_seconds=10.0, source=SOURCE, devices=(DEVICE,))
REPORT = make_report(10, (make_pool(live=60 * GIB, cached=0),), suspendable=True)
ROOM = HostState(free_host_bytes=100 * GIB)


def refused(
    device: DeviceReading = DEVICE,
    report: AgentReport = REPORT,
    found: HostState | None = ROOM,
    allowed: bool = True,
    driver: str | None = "580.159.04",
    pending: int = 0,
    suspensions: tuple[Suspension, ...] = (),
    **request: Any,
) -> str:
    source = replace(SOURCE, driver_version=driver)
    snapshot = replace(SNAPSHOT, devices=(device,), reports=(report,), source=source, suspensions=suspensions)
    answer = next(refusals(snapshot, report, SuspendRequest(process=KEY, **request), allowed, found, pending), None)
    assert answer is None or (answer.reason and answer.remedy)
    return answer.reason if answer else ""


def pool(**fields: Any) -> PoolUsage:
    return replace(REPORT.pools[0], **fields)


def usage(**fields: Any) -> DeviceReading:
    return replace(DEVICE, processes=(replace(USAGE, **fields),))


def test_idle_program_that_allows_it_is_suspended():
    assert refused() == ""
    assert refused(uid=REPORT.uid, min_idle_seconds=3600.0) == ""
    assert refused(replace(DEVICE, vendor="sim"), driver=None) == ""
    assert refused(report=replace(REPORT, components=("ipc",)), driver="610.10") == ""


@pytest.mark.parametrize(
    ("reason", "case"),
    [
        ("the configuration doesn't allow", {"allowed": False}),
        ("the program doesn't allow suspension", {"report": replace(REPORT, suspendable=False)}),
        (f"the program belongs to uid {REPORT.uid}", {"uid": REPORT.uid + 1}),
        (
            f"the program belongs to uid {REPORT.uid}, and the daemon",
            {"found": replace(ROOM, daemon_uid=REPORT.uid + 1)},
        ),
        ("the pid is unknown", {"report": replace(REPORT, pid=2**31)}),
        ("the program is already suspended", {"suspensions": (Suspension("GPU-a", USAGE, 0, 0.0, confirmed=True),)}),
        ("the driver lists no memory", {"device": replace(DEVICE, processes=())}),
        ("the program uses a MIG instance", {"device": replace(DEVICE, parent_uuid="GPU-b")}),
        ("the program is an MPS client", {"device": usage(kinds=("mps",))}),
        ("the driver doesn't report the program's memory", {"device": usage(used_bytes=None)}),
        ("the driver doesn't report the program's memory", {"device": replace(DEVICE, missed_readings=1)}),
        ("the program is stopped", {"device": usage(state="stopped")}),
        ("only NVIDIA's driver", {"device": replace(DEVICE, vendor="amd")}),
        ("the driver (565.57.01) can't", {"driver": "565.57.01"}),
        ("the driver (unknown version) can't", {"driver": None}),
        ("the program shares GPU memory", {"report": replace(REPORT, components=("ipc",))}),
        ("the program uses managed memory", {"report": replace(REPORT, pools=(pool(managed=True),))}),
        ("the program has NCCL communicators", {"report": replace(REPORT, components=("nccl",))}),
        ("the program has been idle for 2 h, less than the required 3 h", {"min_idle_seconds": 10800.0}),
        ("the program's idle time is unknown", {"device": usage(idle_seconds=None), "min_idle_seconds": 1.0}),
        ("the program's children use the GPU too (pid 11, 12)", {"found": replace(ROOM, children=(11, 12))}),
        ("the free host memory is unknown", {"found": replace(ROOM, free_host_bytes=None)}),
        (
            "the program needs 67.1 GiB of host memory, but only 67.0 GiB",
            {"found": replace(ROOM, free_host_bytes=67 * GIB)},
        ),
        (
            "the program needs 97.1 GiB of host memory",
            {"found": replace(ROOM, free_host_bytes=70 * GIB), "pending": 30 * GIB},
        ),
    ],
)
def test_refusal_states_the_reason(reason: str, case: dict[str, Any]):
    assert refused(**case).startswith(reason)


PROGRAM = SuspendedProgram(
    id="10-100",
    pid=10,
    start_ticks=100,
    uid=1000,
    workload="notebook",
    state="suspending",
    since=0.0,
    memory=(SuspendedMemory("GPU-a", 0, 61 * GIB),),
    grants=("grant",),
)


@pytest.mark.parametrize(
    ("state", "driver", "after", "outcome"),
    [
        ("suspending", "checkpointed", "suspended", "suspended"),
        ("suspending", "running", None, "failed"),
        ("suspending", "locked", "suspending", "failed"),
        ("suspending", "", "suspending", "failed"),
        ("resuming", "running", None, "resumed"),
        ("resuming", "checkpointed", "suspended", "failed"),
        ("resuming", "locked", "resuming", "failed"),
        ("resuming", "failed", "stuck", "failed"),
        ("suspended", "running", None, "resumed"),
        ("suspended", "checkpointed", "suspended", None),
        ("suspended", "gone", None, "gone"),
    ],
)
def test_state_of_the_driver_decides(state: Any, driver: str, after: str | None, outcome: str | None):
    settled = checkpoint_outcome(replace(PROGRAM, state=state), CheckpointResponse(state=driver))
    assert (settled.program and settled.program.state, settled.outcome) == (after, outcome)
    late = checkpoint_outcome(replace(PROGRAM, state=state), None)
    assert late.program == replace(PROGRAM, state=state, reason=late.reason)
    assert late.outcome == "timeout"


def test_program_whose_state_is_unknown_states_the_reason_and_has_one_receipt():
    crashed = checkpoint_outcome(
        replace(PROGRAM, state="resuming"), CheckpointResponse(error="the checkpoint process has crashed")
    )
    assert crashed.program == replace(PROGRAM, state="resuming", reason="the checkpoint process has crashed")
    assert (crashed.outcome, crashed.ask_again) == ("failed", True)
    again = checkpoint_outcome(
        crashed.program, CheckpointResponse(error="the checkpoint process has crashed"), state_query=True
    )
    assert (again.program, again.outcome, again.ask_again) == (crashed.program, None, True)


@pytest.mark.parametrize(
    ("state", "reason", "remedy"),
    [
        ("suspending", "the program is being suspended", "wait for its receipt"),
        ("suspended", "the program is already suspended", "to resume it: gpumond resume --pid 10"),
        ("waiting", "the program is about to be resumed", "suspend it when it runs again"),
        ("resuming", "the program is about to be resumed", "suspend it when it runs again"),
        ("stuck", "the program is stuck: CUDA_ERROR", "kill it: kill -9 10"),
    ],
)
def test_program_that_is_not_running_is_not_suspended_again(state: Any, reason: str, remedy: str):
    found = already_suspended(replace(PROGRAM, state=state, reason="CUDA_ERROR"))
    assert (found.reason, found.remedy) == (reason, remedy)


def test_program_whose_restore_has_not_begun_waits_with_its_grants():
    settled = checkpoint_outcome(
        replace(PROGRAM, state="resuming"), CheckpointResponse(state="checkpointed"), state_query=True
    )
    assert settled.program == replace(PROGRAM, state="waiting")


def test_holders_are_named_largest_first():
    others = tuple(replace(USAGE, pid=pid, used_bytes=pid * GIB, comm=f"c{pid}") for pid in (1, 2, 3, 4))
    snapshot = replace(SNAPSHOT, devices=(replace(DEVICE, processes=(USAGE, *others)),))
    assert [each.workload for each in snapshot.holders("GPU-a", KEY)] == ["c4", "c3", "c2"]


def test_grant_that_is_not_used_yet_counts_as_held():
    grant = GrantedRequest(
        id="a", device_uuid="GPU-a", need_bytes=5 * GIB, unused_bytes=4 * GIB, user="ann", workload="pretrain", pid=1
    )
    grants = (grant, replace(grant, pid=2), replace(grant, pid=3, device_uuid="GPU-b"), replace(grant, pid=KEY.pid))
    train = replace(USAGE, pid=1, used_bytes=GIB, comm="train")
    snapshot = replace(SNAPSHOT, devices=(replace(DEVICE, processes=(USAGE, train)),))
    assert [str(each) for each in snapshot.holders("GPU-a", KEY, grants)] == [
        "train (pid 1, 1.0 GiB, 4.0 GiB granted)",
        "pretrain (pid 2, 4.0 GiB granted)",
    ]


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ({"workload": "train"}, "train isn't suspended"),
        ({"pid": 10}, "pid 10 isn't suspended"),
        ({"workload": "trian"}, "no program that has an agent or is suspended matches trian; did you mean train?"),
        (
            {"pid": 11},
            "no program that has an agent or is suspended matches pid 11; to list the programs: gpumond status",
        ),
        ({"all": True}, "no program is suspended"),
    ],
)
def test_refused_resume_states_whether_there_is_such_a_program(target: dict[str, Any], reason: str):
    assert str(nothing_to_resume([REPORT], [], ProgramTarget(**target))) == reason


def competitor(pid: int, cached: int, suspendable: int) -> Neighbor:
    return Neighbor(
        process=ProcessKey(pid, pid),
        uid=1000,
        workload="",
        reclaimable_bytes=cached * GIB,
        suspendable_bytes=suspendable * GIB,
    )


@pytest.mark.parametrize(
    ("short", "flushed", "suspended", "missing"),
    [
        (4, [1], [], 0),
        (10, [1, 2], [], 0),
        (20, [], [2], 0),
        (50, [], [3], 0),
        (95, [1], [3, 2], 0),
        (99, [1], [3, 2], 2),
    ],
)
def test_programs_are_suspended_only_if_flushes_do_not_suffice(short: int, flushed: Any, suspended: Any, missing: int):
    plan = reclaim_plan([competitor(1, 7, 0), competitor(2, 5, 30), competitor(3, 0, 60)], short * GIB, 0)
    assert [each.process.pid for each in plan.flushes] == flushed
    assert [each.process.pid for each in plan.suspensions] == suspended
    assert plan.missing_bytes == missing * GIB


class Driver:
    """A driver with one program. ``failing``: the call that fails."""

    def __init__(self, state: int = RUNNING, failing: str = "") -> None:
        self.now, self.failing, self.calls = state, failing, list[str]()

    def init(self) -> str:
        return self._call("init", self.now)

    def state(self, pid: int) -> tuple[int, str]:
        return self.now, "state: 1" if self.failing == "state" else ""

    def lock(self, pid: int, milliseconds: int) -> str:
        return self._call("lock", LOCKED)

    def checkpoint(self, pid: int) -> str:
        return self._call("checkpoint", CHECKPOINTED)

    def restore(self, pid: int) -> str:
        return self._call("restore", LOCKED)

    def unlock(self, pid: int) -> str:
        return self._call("unlock", RUNNING)

    def resident_bytes(self, pid: int) -> int | None:
        return None

    def _call(self, name: str, after: int) -> str:
        self.calls.append(name)
        if name == self.failing:
            return f"{name}: 1"
        self.now = after
        return ""


@pytest.mark.parametrize(
    ("action", "state", "failing", "calls", "after"),
    [
        ("suspend", RUNNING, "", "init lock checkpoint", "checkpointed"),
        ("suspend", RUNNING, "lock", "init lock", "running"),
        ("suspend", RUNNING, "checkpoint", "init lock checkpoint unlock", "running"),
        ("suspend", CHECKPOINTED, "", "init", "checkpointed"),
        ("suspend", RUNNING, "init", "init", ""),
        ("suspend", RUNNING, "state", "init", ""),
        ("resume", CHECKPOINTED, "", "init restore unlock", "running"),
        ("resume", CHECKPOINTED, "restore", "init restore", "checkpointed"),
        ("resume", LOCKED, "", "init unlock", "running"),
        ("resume", RUNNING, "", "init", "running"),
        ("resume", FAILED, "", "init", "failed"),
        ("settle", LOCKED, "", "init unlock", "running"),
        ("settle", CHECKPOINTED, "", "init", "checkpointed"),
    ],
)
def test_checkpoint_process_calls_the_driver_in_order(action: Any, state: int, failing: str, calls: str, after: str):
    request = CheckpointRequest(
        action=action, pid=os.getpid(), start_ticks=read_start_ticks(os.getpid()) or 0, uid=os.geteuid()
    )
    driver = Driver(state, failing)
    answer = carry_out(request, driver)
    assert (" ".join(driver.calls), answer.state) == (calls, after)
    assert bool(answer.error) == bool(failing)


def test_checkpoint_process_does_nothing_to_another_process_with_the_pid():
    driver = Driver()
    assert carry_out(CheckpointRequest(action="suspend", pid=os.getpid(), start_ticks=1, uid=0), driver).state == "gone"
    assert driver.calls == []
