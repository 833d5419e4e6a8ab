"""Processes that hold memory on a simulated device."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpumond.sim.device import MIB, DeviceSpec, SimDevice, create

HOLD = """
import sys
from gpumond.sim.device import SimDevice
context = SimDevice(sys.argv[1]).attach()
context.allocate(int(sys.argv[2]))
print("holding", flush=True)
sys.stdin.read()
"""


def small_device(directory: Path, uuid: str = "SIM-test", size_mib: int = 1024, index: int = 0) -> SimDevice:
    """Create a device whose contexts cost 16 MiB, and of which the driver keeps 24 MiB."""
    spec = DeviceSpec(uuid, index, "Simulated", size_mib * MIB, reserved_bytes=24 * MIB, context_bytes=16 * MIB)
    return create(directory / uuid, spec)


@contextmanager
def holder(device: SimDevice, size_bytes: int, python: str = sys.executable) -> Iterator[subprocess.Popen[str]]:
    """Run a process that holds these bytes until it is killed or its input ends."""
    command = [python, "-c", HOLD, str(device.directory), str(size_bytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "holding\n"
        try:
            yield process
        finally:
            process.kill()


def run(script: str, *arguments: str) -> str:
    """Return the output of a script in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, text=True, check=True, timeout=60
    )
    return done.stdout
