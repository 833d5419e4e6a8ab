"""Programs that are suspended as cuda-checkpoint suspends them, with the daemon and the agent in processes."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from gpumond.sim.device import MIB, DeviceSpec, SimDevice, create
from tests.helpers.agent_daemon import environment, host
from tests.helpers.running import RunningDaemon, until

UUID = "GPU-simulated"
CONTEXT = 24 * MIB
PROGRAM = """
import sys, time
import gpumond.agent
from gpumond.sim.allocator import CachingAllocator
from gpumond.sim.device import SimDevice
gpumond.agent.start(workload="train")
allocator = CachingAllocator(SimDevice(DIRECTORY))
kept = allocator.malloc(300 << 20)
allocator.free(allocator.malloc(100 << 20))
while True:
    if BUSY:
        allocator.free(allocator.malloc(200 << 20))
        allocator.empty_cache()
    time.sleep(0.05)
"""
LIVE, CACHED = 300 * MIB, 100 * MIB
WRONG = ("memory-freed", "crash", "crash-loop", "leak", "orphan")


@pytest.fixture
def device(tmp_path: Path) -> SimDevice:
    return create(tmp_path / "devices" / "card", DeviceSpec(UUID, 0, "sim", 4096 * MIB, context_bytes=CONTEXT))


@pytest.fixture
def daemon(serve: Callable[..., RunningDaemon], device: SimDevice) -> RunningDaemon:
    environ = {"GPUMOND_SIM_DIR": str(device.directory.parent)}
    return with_frame(serve("--source", "sim", "--interval", "0.2s", environ=environ))


def with_frame(daemon: RunningDaemon) -> RunningDaemon:
    until(lambda: daemon.request("/api/v1/frame")[0] == 200)
    return daemon


def program(
    daemon: RunningDaemon, device: SimDevice, busy: bool = False, code: str = PROGRAM
) -> AbstractContextManager[subprocess.Popen[str]]:
    code = code.replace("BUSY", str(busy)).replace("DIRECTORY", repr(str(device.directory)))
    return host(code, environment(daemon.socket))


def row_of(frame: dict[str, Any]) -> dict[str, Any]:
    """Return the only process, or nothing."""
    return next(iter(frame["processes"]), {})


def checked(daemon: RunningDaemon, seconds: float) -> Iterator[dict[str, Any]]:
    """Yield the program's row for some seconds, in frames without a wrong verdict, fault, alert or byte."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        frame = daemon.get("frame")
        assert [each["kind"] for each in frame["verdicts"] if each["kind"] in WRONG] == []
        assert (frame["snapshot"]["faults"], frame["alerts"]) == ([], [])
        assert [each["overcount_bytes"] for each in frame["ledger"]["overcounts"]] == [0]
        lines = frame["ledger"]["lines"]
        assert sum(line["used_bytes"] for line in lines) == frame["snapshot"]["devices"][0]["used_bytes"]
        yield row_of(frame)
        time.sleep(0.05)


def events(daemon: RunningDaemon) -> list[str]:
    _, body, _ = daemon.request("/api/v1/events", Accept="application/json")
    return [event["kind"] for event in json.loads(body)]


def is_live(daemon: RunningDaemon) -> bool:
    return (row_of(daemon.get("frame")).get("live_bytes") or 0) >= LIVE


@pytest.mark.parametrize(
    ("busy", "cycles", "seconds"), [(False, 10, 1.0), (True, 2, 3.0)], ids=["idle", "blocked-in-its-allocator"]
)
def test_suspended_program_has_unmapped_bytes_and_no_verdict(
    daemon: RunningDaemon, device: SimDevice, busy: bool, cycles: int, seconds: float
):
    with program(daemon, device, busy) as process:
        until(lambda: is_live(daemon))
        for _ in range(cycles):
            device.suspend(process.pid)
            until(lambda: row_of(daemon.get("frame")).get("state") == "suspended")
            for own in checked(daemon, seconds):
                assert (own["state"], own["used_bytes"], own["live_bytes"]) == ("suspended", 0, None)
                assert own["unmapped_bytes"] >= LIVE
            (condition,) = [each for each in daemon.get("status")["conditions"] if each["kind"] == "suspended"]
            assert f"pid {process.pid} (train)" in condition["detail"]
            device.resume(process.pid)
            until(lambda: is_live(daemon))
            assert not [each for each in daemon.get("status")["conditions"] if each["kind"] == "suspended"]
        assert "agent-disconnected" not in events(daemon)
        assert "process-ended" not in events(daemon)


def test_end_of_a_suspended_program_is_an_end(daemon: RunningDaemon, device: SimDevice):
    with program(daemon, device) as process:
        until(lambda: is_live(daemon))
        device.suspend(process.pid)
        until(lambda: row_of(daemon.get("frame")).get("state") == "suspended")
    until(lambda: not daemon.get("processes"))
    assert "agent-disconnected" in events(daemon)


def test_program_that_returned_all_its_memory_is_not_suspended(daemon: RunningDaemon, device: SimDevice):
    code = PROGRAM.replace("time.sleep(0.05)", "sys.stdin.read(1) and allocator.close()")
    with program(daemon, device, code=code) as process:
        until(lambda: is_live(daemon))
        process.stdin.write("x")
        process.stdin.flush()
        until(lambda: not daemon.get("processes"))
        assert not [each for each in daemon.get("status")["conditions"] if each["kind"] == "suspended"]


def test_flush_of_a_suspended_program_is_deferred_at_once_and_never_executed(daemon: RunningDaemon, device: SimDevice):
    with program(daemon, device) as process:
        until(lambda: is_live(daemon))
        device.suspend(process.pid)
        until(lambda: row_of(daemon.get("frame")).get("state") == "suspended")
        for dry_run in (True, False):
            status, answer, _ = daemon.flush(target={"pid": process.pid}, dry_run=dry_run)
            (receipt,) = answer["receipts"]
            assert (status, receipt["outcome"], receipt["steps"]) == (200, "deferred", [])
            assert receipt["reason"].startswith("suspended")
            assert receipt["duration_seconds"] < 1.0
        device.resume(process.pid)
        until(lambda: is_live(daemon))
        for own in checked(daemon, 1.5):
            assert (own["cached_bytes"], own["stranded_bytes"]) == (CACHED, 0)
        _, answer, _ = daemon.flush(target={"pid": process.pid})
        assert [(each["outcome"], each["released_bytes"]) for each in answer["receipts"]] == [("freed", CACHED)]


def test_flush_that_a_suspension_overtakes_is_not_executed_when_the_program_resumes(
    serve: Callable[..., RunningDaemon], device: SimDevice
):
    environ = {"GPUMOND_SIM_DIR": str(device.directory.parent)}
    daemon = with_frame(serve("--source", "sim", "--interval", "4s", environ=environ))  # too slow to see it in time
    with program(daemon, device) as process:
        until(lambda: is_live(daemon))
        device.suspend(process.pid)
        _, answer, _ = daemon.flush(target={"pid": process.pid}, timeout_seconds=1)
        assert [each["outcome"] in ("timeout", "deferred") for each in answer["receipts"]] == [True]
        device.resume(process.pid)
        until(lambda: daemon.get("agents")[0]["age_seconds"] < 1.0)
        # A frame may still be that of a reading before the resumption.
        until(lambda: is_live(daemon) and row_of(daemon.get("frame")).get("cached_bytes") == CACHED)
