"""A daemon that cannot start leaves no process behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakenvml import FakeDriver, machine
from tests.helpers.running import free_port, until


def processes_with(marker: str) -> list[int]:
    """Return the living processes whose environment contains the marker."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and marker.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:  # ended, or of another user
            pass
    return found


@pytest.mark.parametrize("cause", ["socket", "configuration"])
def test_process_of_a_hanging_driver_ends_with_a_daemon_that_cannot_start(
    driver: FakeDriver, tmp_path: Path, cause: str
):
    driver.devices = machine(1)
    driver.hang("nvmlInitWithFlags")
    driver.hang("nvmlInit_v2")
    driver.write()
    marker = f"GPUMOND_TEST_RUN={tmp_path}"
    environ = {**os.environ, **driver.env, "GPUMOND_TEST_RUN": str(tmp_path)}
    agents = "/dev/null/agent.sock" if cause == "socket" else str(tmp_path / "agent.sock")
    options = ["--config", str(tmp_path / "absent.yaml")] if cause == "configuration" else []
    command = [sys.executable, "-m", "gpumond", "serve", "--source", "nvml", "--listen", f"127.0.0.1:{free_port()}"]
    command += ["--socket", agents, "--state-dir", str(tmp_path / "state"), *options]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode in (1, 2), done.stderr
    assert "Traceback" not in done.stderr
    until(lambda: not processes_with(marker))
