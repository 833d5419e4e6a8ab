"""Programs on one simulated device of 1 GiB that execute lines of their input."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpumond.sim.device import MIB, DeviceSpec, create
from tests.helpers.agent_daemon import environment, host
from tests.helpers.running import RunningDaemon, until

PROGRAM = """
import sys
import gpumond.agent as agent
from gpumond.sim.allocator import CachingAllocator
from gpumond.sim.device import MIB, OutOfMemory, SimDevice
allocator = CachingAllocator(SimDevice("CARD"))
kept = allocator.malloc(50 * MIB)
def suppressed(call):
    try:
        return call()
    except OutOfMemory:
        pass
agent.start(workload=sys.argv[1] if len(sys.argv) > 1 else "NAME", allow_limit=True)
for line in sys.stdin:
    exec(line)
    print("did", line, end="", flush=True)
"""


def card(daemon: RunningDaemon) -> Path:
    """Create the device that the daemon reads."""
    directory = Path(daemon.environ["GPUMOND_SIM_DIR"]) / "card"
    create(directory, DeviceSpec("GPU-simulated", 0, "sim", 1024 * MIB, context_bytes=16 * MIB))
    return directory


@contextmanager
def program(daemon: RunningDaemon, card: Path, name: str) -> Iterator[subprocess.Popen[str]]:
    """Run a program, and wait until the daemon has its report."""
    code = PROGRAM.replace("CARD", os.fspath(card)).replace("NAME", name)
    with host(code, environment(daemon.socket)) as process:
        until(lambda: daemon.request("/api/v1/agents")[0] == 200)
        until(lambda: process.pid in [each["pid"] for each in daemon.get("agents")])
        yield process
