"""Programs on a simulated device, and requests about them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from gpumond.sim.device import MIB, SimDevice
from tests.helpers.agent_daemon import environment, host
from tests.helpers.running import RunningDaemon

HELD, CONTEXT = 600 * MIB, 24 * MIB
PROGRAM = """
import sys
import gpumond.agent
from gpumond.sim.allocator import CachingAllocator
from gpumond.sim.device import SimDevice
gpumond.agent.start(workload=WORKLOAD, suspendable=SUSPENDABLE)
allocator = CachingAllocator(SimDevice(DIRECTORY))
kept = allocator.malloc(SIZE)
print("ready", flush=True)
for line in sys.stdin:
    exec(line)
    print("did", line.strip(), flush=True)
"""


def program(
    daemon: RunningDaemon,
    device: SimDevice,
    workload: str = "notebook",
    size: int = HELD,
    suspendable: bool = True,
) -> AbstractContextManager[subprocess.Popen[str]]:
    """Run a program that holds ``size`` bytes and executes the lines that it receives."""
    code = PROGRAM.replace("WORKLOAD", repr(workload)).replace("SUSPENDABLE", str(suspendable))
    code = code.replace("DIRECTORY", repr(str(device.directory))).replace("SIZE", str(size))
    return host(code, environment(daemon.socket))


def do(process: subprocess.Popen[str], line: str) -> None:
    """Send a line to a program, without waiting for it."""
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def output(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def ask(daemon: RunningDaemon, route: str, **body: Any) -> Mapping[str, Any]:
    """Suspend or resume, and return the only receipt, or the problem."""
    token = (daemon.directory / "token").read_text().strip()
    status, answer, _ = daemon.request(f"/api/v1/{route}", body, Authorization=f"Bearer {token}")
    content = json.loads(answer)
    if status != 200:
        return {"status": status, **content}
    (receipt,) = content["receipts"]
    return receipt


def suspend(daemon: RunningDaemon, pid: int, **body: Any) -> Mapping[str, Any]:
    return ask(daemon, "suspensions", target={"pid": pid}, **body)


def resume(daemon: RunningDaemon, pid: int, wait: float = 0.0) -> Mapping[str, Any]:
    return ask(daemon, "resumptions", target={"pid": pid}, wait_seconds=wait)


def cancel(daemon: RunningDaemon, pid: int) -> int:
    """Cancel a resumption that waits. Returns the status."""
    token = (daemon.directory / "token").read_text().strip()
    return daemon.request(f"/api/v1/resumptions/{pid}", None, "DELETE", Authorization=f"Bearer {token}")[0]


def row(daemon: RunningDaemon, pid: int) -> Mapping[str, Any]:
    return next((each for each in daemon.get("frame")["processes"] if each["pid"] == pid), {})


def is_reported(daemon: RunningDaemon, pid: int, size: int = HELD) -> bool:
    return (row(daemon, pid).get("live_bytes") or 0) >= size
