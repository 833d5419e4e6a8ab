"""Runs of `gpumond loadgen` on a simulated device."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpumond.sim.device import MIB, DeviceSpec, SimDevice, create
from tests.helpers import forks

SIZE = 8192 * MIB


CONTEXT = 64 * MIB


@pytest.fixture
def device(tmp_path: Path) -> SimDevice:
    return create(tmp_path / "cards" / "card0", DeviceSpec("SIM-load", 0, "Simulated", SIZE, context_bytes=CONTEXT))


@contextmanager
def running(device: SimDevice | None, *arguments: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "gpumond", "loadgen", *arguments]
    if device is not None:
        command += ["--sim-device", str(device.directory)]
    env = {**os.environ, "GPUMOND_SOCKET": "/nonexistent/agent.sock", **environ}
    with forks.start(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def load(device: SimDevice | None, *arguments: str, **environ: str) -> tuple[int, str, str]:
    with running(device, *arguments, **environ) as process:
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err
