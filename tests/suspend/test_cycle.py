"""A program is suspended and resumed, with the daemon, the agent and the checkpoint process in processes."""

from __future__ import annotations

import http.client
import json
import os
import pwd
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest

from gpumond.sim.device import MIB, SimDevice
from gpumond.view.rows import suspension_sentence
from tests.fakecuda import FakeCuda
from tests.helpers.agent_daemon import environment
from tests.helpers.running import RunningDaemon, until
from tests.suspend.conftest import ALLOWED, OPTIONS, ready
from tests.suspend.programs import (
    CONTEXT,
    HELD,
    PROGRAM,
    cancel,
    do,
    is_reported,
    output,
    program,
    resume,
    row,
    suspend,
)


def used(device: SimDevice) -> int:
    return device.read().used_bytes or 0


def test_memory_leaves_the_device_and_returns_for_a_second_program(
    daemon: RunningDaemon, device: SimDevice, cuda: FakeCuda
) -> None:
    with program(daemon, device) as notebook:
        assert output(notebook) == "ready"
        until(lambda: is_reported(daemon, notebook.pid))
        receipt = suspend(daemon, notebook.pid)
        assert (receipt["outcome"], receipt["reason"]) == ("suspended", "")
        assert receipt["expected_bytes"] == receipt["released_bytes"] == HELD + CONTEXT
        assert [name for name, _ in receipt["steps"]] == ["lock", "checkpoint"]
        assert (used(device), cuda.state(notebook.pid)) == (0, "checkpointed")
        until(lambda: row(daemon, notebook.pid).get("state") == "suspended")
        frame = daemon.get("frame")
        (own,) = frame["snapshot"]["suspended_programs"]
        assert (own["state"], own["memory"][0]["used_bytes"]) == ("suspended", HELD + CONTEXT)
        assert row(daemon, notebook.pid)["unmapped_bytes"] == HELD
        assert [each["kind"] for each in frame["verdicts"]] == []
        with program(daemon, device, "train", 700 * MIB, suspendable=False) as train:
            assert output(train) == "ready"
            until(lambda: is_reported(daemon, train.pid, 700 * MIB))
            refused = resume(daemon, notebook.pid)
            assert (refused["outcome"], refused["state"]) == ("refused", "suspended")
            assert refused["missing_bytes"] == HELD + CONTEXT - (1024 - 724) * MIB
            assert [(each["pid"], each["workload"]) for each in refused["holders"]] == [(train.pid, "train")]
            assert "restore" not in "".join(cuda.calls())
        back = resume(daemon, notebook.pid, wait=30)
        assert (back["outcome"], back["state"]) == ("resumed", "")
        assert (used(device), cuda.state(notebook.pid)) == (HELD + CONTEXT, "running")
        do(notebook, "allocator.free(kept)")
        assert output(notebook) == "did allocator.free(kept)"
        until(lambda: row(daemon, notebook.pid).get("cached_bytes") == HELD)
        assert daemon.get("frame")["snapshot"]["suspended_programs"] == []


def test_wait_of_a_resumption_is_cancelled(daemon: RunningDaemon, device: SimDevice, cuda: FakeCuda) -> None:
    with program(daemon, device) as notebook, ThreadPoolExecutor() as pool:
        until(lambda: is_reported(daemon, notebook.pid))
        assert suspend(daemon, notebook.pid)["outcome"] == "suspended"
        with program(daemon, device, "train", 700 * MIB, suspendable=False) as train:
            until(lambda: is_reported(daemon, train.pid, 700 * MIB))
            waiting = pool.submit(resume, daemon, notebook.pid, 60)
            until(lambda: [each["state"] for each in daemon.get("suspensions")] == ["waiting"])
            assert cancel(daemon, notebook.pid) == 204
            receipt = waiting.result(30)
            assert (receipt["outcome"], receipt["state"]) == ("refused", "suspended")
            assert receipt["reason"].endswith("canceled the request to resume")
            assert cancel(daemon, notebook.pid) == 404
            until(lambda: daemon.get("frame")["queue"] == [])
        assert resume(daemon, notebook.pid, wait=30)["outcome"] == "resumed", "an earlier cancellation is over"


def test_programs_that_need_memory_share_the_device_with_idle_ones(
    daemon: RunningDaemon, device: SimDevice, cuda: FakeCuda
) -> None:
    with program(daemon, device) as notebook:
        until(lambda: is_reported(daemon, notebook.pid))
        until(lambda: daemon.get("agents")[0]["may_suspend"])
        need = ["--need", "700MiB", "--wait", "1m", "--", sys.executable, "-c", "print('started')"]
        refused = daemon.run("run", *need[:2], *need[4:])
        assert f"Suspending notebook (pid {notebook.pid}" in refused.stderr
        started = daemon.run("run", *need)
        assert (started.returncode, started.stdout) == (0, "started\n")
        assert cuda.state(notebook.pid) == "checkpointed"
        assert resume(daemon, notebook.pid, wait=30)["outcome"] == "resumed"


def test_rule_suspends_an_idle_program(serve: Callable[..., RunningDaemon], device: SimDevice, cuda: FakeCuda) -> None:
    rule = {"name": "idle", "scope": "process", "value": "used_bytes", "above": "1MiB", "action": {"suspend": True}}
    config = device.directory.parent.parent / "config.yaml"
    config.write_text(json.dumps({"rules": [rule], "allow_suspend": True, "suspend_after_idle": "3s"}))
    daemon = ready(serve(*OPTIONS, "--config", str(config), environ=cuda.env))
    with program(daemon, device) as notebook, program(daemon, device, "other", 100 * MIB, suspendable=False) as other:
        until(lambda: is_reported(daemon, notebook.pid))
        busy = f"SimDevice({str(device.directory)!r}).attach().set_utilization"
        do(notebook, f"{busy}(1.0)")
        until(lambda: daemon.get("alerts"))
        do(notebook, f"{busy}(0.0)")
        until(lambda: cuda.state(notebook.pid) == "checkpointed")
        until(lambda: f"process {notebook.pid} is suspended" in str(daemon.get("alerts/history")))
        (receipt,) = daemon.get("suspensions/receipts")
        assert (receipt["requested_by"], receipt["released_bytes"]) == ("rule:idle", 624 * MIB)
        assert cuda.state(other.pid) == "running"


def test_reserve_suspends_an_idle_program(
    serve: Callable[..., RunningDaemon], device: SimDevice, cuda: FakeCuda
) -> None:
    match = {"user": pwd.getpwuid(os.geteuid()).pw_name, "workload": "train"}
    quota = {"name": "training", "match": match, "reserve": "700MiB"}
    config = device.directory.parent.parent / "config.yaml"
    config.write_text(json.dumps({"quotas": [quota], "allow_suspend": True, "suspend_after_idle": "0s"}))
    daemon = ready(serve(*OPTIONS, "--config", str(config), environ=cuda.env))
    with program(daemon, device) as notebook, program(daemon, device, "train", 100 * MIB, suspendable=False):
        until(lambda: cuda.state(notebook.pid) == "checkpointed")
        until(lambda: row(daemon, notebook.pid).get("state") == "suspended")


def test_program_of_run_is_resumed_by_a_signal(daemon: RunningDaemon, device: SimDevice, cuda: FakeCuda) -> None:
    code = PROGRAM.replace(", suspendable=SUSPENDABLE", "").replace("WORKLOAD", "'run'").replace("SIZE", str(HELD))
    code = code.replace("DIRECTORY", repr(str(device.directory)))
    command = [sys.executable, "-m", "gpumond", "run", "--suspendable", "--", sys.executable, "-c", code]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment(daemon.socket), text=True, **pipes) as notebook:
        assert output(notebook) == "ready"
        for _ in range(3):
            until(lambda: is_reported(daemon, notebook.pid))
            assert suspend(daemon, notebook.pid)["outcome"] == "suspended"
            until(lambda: row(daemon, notebook.pid).get("state") == "suspended")
            do(notebook, "allocator.free(allocator.malloc(1))")  # its main thread waits for the device
            notebook.send_signal(signal.SIGCONT)
            until(lambda: cuda.state(notebook.pid) == "running")
            assert output(notebook).startswith("did")
        notebook.kill()


def test_commands_print_receipts_and_the_state_and_a_flush_is_deferred(
    daemon: RunningDaemon, device: SimDevice
) -> None:
    with program(daemon, device) as notebook:
        until(lambda: is_reported(daemon, notebook.pid))
        planned = daemon.run("suspend", "--workload", "notebook", "--dry-run")
        assert (planned.returncode, "planned" in planned.stdout) == (0, True)
        for options, status, problem in (
            (("--idle-for", "1h"), 3, "no matching program that allows suspension has been idle for that long"),
            (("notebok",), 3, "no program with an agent matches workload notebok; did you mean notebook?"),
        ):
            refused = daemon.run("suspend", *options)
            assert (refused.returncode, problem in refused.stderr) == (status, True), refused
        done = daemon.run("suspend", "--pid", str(notebook.pid))
        assert (done.returncode, "suspended" in done.stdout) == (0, True)
        until(lambda: row(daemon, notebook.pid).get("state") == "suspended")
        assert "needs 624.0 MiB to resume" in daemon.run("status").stdout
        _, answer, _ = daemon.flush(target={"pid": notebook.pid})
        assert [each["outcome"] for each in answer["receipts"]] == ["deferred"]
        assert daemon.run("resume", "--all").returncode == 0
        receipts = json.loads(daemon.run("receipts", "--json").stdout)
        suspended, resumed = [each for each in receipts if "action" in each]
        assert (suspended["action"], suspended["released_bytes"]) == ("suspend", 624 * MIB)
        assert (resumed["action"], resumed["outcome"]) == ("resume", "resumed")
        shown = daemon.run("receipts").stdout
        assert all(outcome in shown for outcome in ("suspended", "resumed"))


def test_suspensions_are_off_by_default(serve: Callable[..., RunningDaemon], device: SimDevice, cuda: FakeCuda) -> None:
    daemon = ready(serve("--source", "sim", "--interval", "0.2s", environ=cuda.env))
    with program(daemon, device) as notebook:
        until(lambda: is_reported(daemon, notebook.pid))
        assert suspend(daemon, notebook.pid)["remedy"] == "set allow_suspend: true"
        assert cuda.calls() == []


def test_refused_and_failed_suspensions_leave_the_program_running_and_its_end_removes_it(
    daemon: RunningDaemon, device: SimDevice, cuda: FakeCuda
) -> None:
    with program(daemon, device, suspendable=False) as other:
        until(lambda: is_reported(daemon, other.pid))
        receipt = suspend(daemon, other.pid)
        assert receipt["outcome"] == "refused"
        assert "gpumond run --suspendable" in receipt["remedy"]
        assert cuda.calls() == []
    with program(daemon, device) as notebook:
        until(lambda: is_reported(daemon, notebook.pid))
        for function in ("lock", "checkpoint"):
            cuda.fail(function, "before", "801")
            receipt = suspend(daemon, notebook.pid)
            assert (receipt["outcome"], receipt["state"]) == ("failed", "")
            assert receipt["reason"].endswith("CUDA_ERROR_NOT_SUPPORTED")
            assert cuda.state(notebook.pid) == "running"
        assert suspend(daemon, notebook.pid)["outcome"] == "suspended"
        notebook.kill()
        notebook.wait()
        until(lambda: daemon.get("suspensions") == [])
        until(lambda: not row(daemon, notebook.pid))
        assert resume(daemon, notebook.pid)["status"] == 404


EVERY_CHANGE = {
    ("kill", "checkpoint", "after"),
    ("kill", "restore", "before"),
    ("daemon", "checkpoint", "before"),
    ("daemon", "restore", "after"),
}
"""The kills that are tested for every change; the others are soak tests."""


@pytest.mark.parametrize(
    ("who", "function", "place"),
    [
        pytest.param(*each, marks=() if each in EVERY_CHANGE else pytest.mark.soak)
        for each in product(("kill", "daemon"), ("lock", "checkpoint", "restore", "unlock"), ("before", "after"))
    ],
)
def test_kill_of_checkpoint_process_or_daemon_loses_neither_program_nor_grant(
    serve: Callable[..., RunningDaemon], device: SimDevice, cuda: FakeCuda, who: str, function: str, place: str
) -> None:
    daemon = ready(serve(*OPTIONS, environ=cuda.env | ALLOWED))
    with program(daemon, device) as notebook:
        until(lambda: is_reported(daemon, notebook.pid))
        if function in ("lock", "checkpoint"):
            cuda.fail(function, place, who)
        else:
            assert suspend(daemon, notebook.pid)["outcome"] == "suspended"
            cuda.fail(function, place, who)
        act = suspend if function in ("lock", "checkpoint") else resume
        if who == "daemon":
            with pytest.raises((ConnectionError, http.client.HTTPException)):
                act(daemon, notebook.pid)
            daemon.process.wait()
            daemon = ready(RunningDaemon(daemon.directory, *OPTIONS, environ=cuda.env | ALLOWED, url=daemon.url))
        else:
            act(daemon, notebook.pid)
        try:
            until(lambda: all(each["state"] == "suspended" for each in daemon.get("suspensions")), 90)
            if daemon.get("suspensions"):
                assert cuda.state(notebook.pid) == "checkpointed"
                until(lambda: row(daemon, notebook.pid).get("state") == "suspended")
                assert resume(daemon, notebook.pid, wait=30)["outcome"] == "resumed"
            assert cuda.state(notebook.pid) == "running"
            assert "stuck" not in "".join(cuda.calls())
            assert used(device) == HELD + CONTEXT
            do(notebook, "allocator.free(kept)")
            assert output(notebook) == "ready"
            assert output(notebook) == "did allocator.free(kept)"
        finally:
            if daemon.process.poll() is None:
                daemon.stop()


def test_crash_of_the_checkpoint_process_has_a_receipt_an_event_and_a_reason_and_the_next_counts_from_the_request(
    daemon: RunningDaemon, device: SimDevice, cuda: FakeCuda
) -> None:
    with program(daemon, device) as notebook:
        until(lambda: is_reported(daemon, notebook.pid))
        assert suspend(daemon, notebook.pid)["outcome"] == "suspended"
        cuda.fail("restore", "before", "kill")
        receipt = resume(daemon, notebook.pid, wait=30)
        crash = "the checkpoint process has crashed (signal 9); see the daemon's log"
        assert (receipt["outcome"], receipt["reason"], receipt["state"]) == ("failed", crash, "resuming")
        (pending,) = daemon.get("suspensions")
        assert (pending["state"], pending["reason"]) == ("resuming", crash)
        assert pending["resume_since"] == receipt["started_at"]
        sentence = suspension_sentence(pending, pending["resume_since"] + 9)
        assert re.match(r"resuming for 9 s; suspended for .*crashed", sentence)
        until(lambda: f"failed: {crash}" in daemon.run("events").stdout)
        until(lambda: daemon.get("suspensions") == [])
        last = until(lambda: [each for each in daemon.get("suspensions/receipts") if each["outcome"] == "resumed"])[0]
        assert last["started_at"] == receipt["started_at"]
        assert last["duration_seconds"] > receipt["duration_seconds"]
        assert last["returned_bytes"] == HELD + CONTEXT
        table = daemon.run("receipts").stdout
        assert crash in table
        assert "624.0 MiB back on the GPU" in table


def test_checkpoint_process_that_hangs_delays_nothing_else(
    daemon: RunningDaemon, device: SimDevice, cuda: FakeCuda
) -> None:
    with program(daemon, device) as notebook:
        until(lambda: is_reported(daemon, notebook.pid))
        cuda.fail("cuInit", "before", "hang")
        command = ["suspend", "--pid", str(notebook.pid)]
        with subprocess.Popen([sys.executable, "-m", "gpumond", *command], env=daemon.environ) as waiting:
            until(lambda: cuda.calls() == ["cuInit 0 hang"])
            number = daemon.get("frame")["snapshot"]["seq"]
            until(lambda: daemon.get("frame")["snapshot"]["seq"] > number + 3)
            waiting.send_signal(signal.SIGKILL)
        assert daemon.get("suspensions")[0]["state"] == "suspending"
        assert os.path.exists(daemon.directory / "state" / "suspend")
