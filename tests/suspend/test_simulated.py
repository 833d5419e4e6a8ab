"""Programs of simulated devices are suspended by the devices' own driver, as in the demo."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpumond.facts.units import MIB
from gpumond.features.suspend.checkpoint_process import CheckpointRequest, CudaDriver, carry_out, driver_of
from gpumond.host.machine import read_start_ticks
from gpumond.sim.device import DeviceSpec, SimDevice, SimDriver, create
from tests.helpers.agent_daemon import environment
from tests.helpers.holding import holder
from tests.helpers.running import RunningDaemon, until
from tests.suspend.conftest import ALLOWED, OPTIONS, ready
from tests.suspend.programs import CONTEXT, HELD, do, is_reported, output, program, resume, row, suspend

SPEC = DeviceSpec("GPU-simulated", 0, "sim", 1024 * MIB, context_bytes=CONTEXT, can_suspend=True)


@pytest.fixture
def device(tmp_path: Path) -> SimDevice:
    return create(tmp_path / "devices" / "card", SPEC)


def receipts(daemon: RunningDaemon) -> Any:
    return [each for each in daemon.get("suspensions/receipts") if "action" in each]


def request(action: str, pid: int) -> CheckpointRequest:
    return CheckpointRequest(action=action, pid=pid, start_ticks=read_start_ticks(pid) or 0, uid=os.geteuid())  # type: ignore[arg-type]


def test_driver_is_that_of_the_devices_that_a_process_uses(
    device: SimDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holder(device, HELD) as process:
        assert isinstance(driver_of(process.pid), CudaDriver)
        monkeypatch.setenv("GPUMOND_SIM_DIR", str(device.directory.parent))
        assert isinstance(driver_of(process.pid), SimDriver)
        assert isinstance(driver_of(os.getpid()), CudaDriver)
    old = create(tmp_path / "old" / "card", replace(SPEC, can_suspend=False))
    monkeypatch.setenv("GPUMOND_SIM_DIR", str(old.directory.parent))
    with holder(old, HELD) as process:
        assert isinstance(driver_of(process.pid), CudaDriver)


def test_restore_waits_until_the_memory_is_free(device: SimDevice) -> None:
    with holder(device, HELD) as process:
        driver = SimDriver(device.directory.parent, process.pid)
        answer = carry_out(request("suspend", process.pid), driver)
        assert (answer.state, answer.host_bytes) == ("checkpointed", HELD + CONTEXT)
        assert device.read().used_bytes == 0
        with holder(device, 700 * MIB):
            restoring = threading.Thread(target=carry_out, args=(request("resume", process.pid), driver))
            restoring.start()
            assert driver.state(process.pid) == (2, "")
        restoring.join()
        assert driver.state(process.pid) == (0, "")
        assert device.read().used_bytes == HELD + CONTEXT


def test_locked_program_is_unlocked(device: SimDevice) -> None:
    with holder(device, HELD) as process:
        driver = SimDriver(device.directory.parent, process.pid)
        driver.lock(process.pid, 0)
        assert driver.state(process.pid) == (1, "")
        assert carry_out(request("settle", process.pid), driver).state == "running"


@pytest.mark.slow
def test_killed_daemon_knows_its_suspended_program_again(
    serve: Callable[..., RunningDaemon], device: SimDevice
) -> None:
    environ = ALLOWED | {"GPUMOND_SIM_DIR": str(device.directory.parent)}
    daemon = ready(serve(*OPTIONS, environ=environ))
    with program(daemon, device) as notebook:
        assert output(notebook) == "ready"
        until(lambda: is_reported(daemon, notebook.pid))
        receipt = suspend(daemon, notebook.pid)
        assert (receipt["outcome"], receipt["reason"]) == ("suspended", "")
        assert receipt["expected_bytes"] == receipt["released_bytes"] == receipt["host_bytes"] == HELD + CONTEXT
        until(lambda: row(daemon, notebook.pid).get("state") == "suspended")
        assert "suspended" not in {each["kind"] for each in daemon.get("status")["conditions"]}  # by another tool
        do(notebook, "allocator.free(kept)")  # waits for the device
        daemon.process.send_signal(signal.SIGKILL)
        daemon.process.wait()
        daemon = ready(RunningDaemon(daemon.directory, *OPTIONS, environ=environ, url=daemon.url))
        try:
            until(lambda: [each["state"] for each in daemon.get("suspensions")] == ["suspended"])
            assert device.read().used_bytes == 0
            with ThreadPoolExecutor(2) as pool:  # the second waits for the first
                answers = list(pool.map(lambda _: resume(daemon, notebook.pid, wait=30), range(2)))
            assert {each["outcome"] for each in answers} == {"resumed", "refused"}
            assert all(each["workload"] == receipt["workload"] and each["duration_seconds"] > 0 for each in answers)
            assert output(notebook) == "did allocator.free(kept)"
            until(lambda: row(daemon, notebook.pid).get("cached_bytes") == HELD)
        finally:
            daemon.stop()


@pytest.mark.slow
def test_idle_program_of_the_demo_gives_way_to_one_that_needs_memory_and_comes_back(
    serve: Callable[..., RunningDaemon], device: SimDevice
) -> None:
    daemon = ready(serve(*OPTIONS, environ=ALLOWED | {"GPUMOND_SIM_DIR": str(device.directory.parent)}))
    command = [sys.executable, "-m", "gpumond.sim.programs", "idle", "--device", str(device.directory), "--speed", "40"]
    with subprocess.Popen(command, env=environment(daemon.socket)) as notebook:
        try:
            until(lambda: any(each["may_suspend"] for each in daemon.get("agents")))
            need = ("--need", "800MiB", "--wait", "1m", "--url", daemon.url, "--", sys.executable, "-c", "")
            assert daemon.run("run", *need).returncode == 0
            until(lambda: [each["action"] for each in receipts(daemon)] == ["suspend", "resume"])
            assert {each["outcome"] for each in receipts(daemon)} == {"suspended", "resumed"}
            assert receipts(daemon)[1]["requested_by"] == "SIGCONT"
        finally:
            notebook.terminate()
