"""A stopped child of the collector does not outlive its daemon."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from gpumond.sim.device import MIB, Spec, create
from tests.helpers.running import RunningDaemon, until


def child_of(daemon: RunningDaemon) -> int:
    pid = daemon.process.pid
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert b"gpumond.devices.child.worker" in Path(f"/proc/{child}/cmdline").read_bytes()
    return int(child)


def state(pid: int) -> str:
    """Return the state in /proc: T is stopped; Z, or nothing, is exited."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_stopped_child_ends_with_the_daemon(serve: Callable[..., RunningDaemon], tmp_path: Path, end: signal.Signals):
    create(tmp_path / "sim" / "card0", Spec("GPU-simulated", 0, "sim", 1024 * MIB))
    daemon = serve("--source", "sim", environ={"GPUMOND_SIM_DIR": str(tmp_path / "sim")})
    until(lambda: daemon.request("/-/ready")[0] == 200)
    child = child_of(daemon)
    os.kill(child, signal.SIGSTOP)
    until(lambda: state(child) == "T")
    daemon.process.send_signal(end)
    daemon.process.wait(timeout=20)
    until(lambda: state(child) in ("", "Z"))
