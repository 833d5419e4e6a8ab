"""Programs on a real device, started through `gpumond run`, with a known amount of memory."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.helpers.running import RunningDaemon, until

MIB = 1 << 20
REPORT_SECONDS = 1.0

TORCH = """
import sys, torch
blocks = [torch.empty({block} << 20, dtype=torch.uint8, device="cuda") for _ in range({blocks})]
small = [torch.empty(300_000, dtype=torch.uint8, device="cuda") for _ in range(64)]
del blocks[::2], small[::2]
torch.cuda.synchronize()
print("ready", flush=True)
sys.stdin.read()
"""

CUPY = """
import sys, cupy
blocks = [cupy.empty({block} << 20, dtype=cupy.uint8) for _ in range({blocks})]
del blocks[::2]
pieces = [cupy.empty(100 << 20, dtype=cupy.uint8) for _ in range(4)]  # of a free chunk each, whose rest stays
cupy.cuda.Device().synchronize()
print("ready", flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True)
class GpuProgram:
    name: str
    library: str
    script: str
    environ: tuple[tuple[str, str], ...] = ()

    def missing(self) -> str:
        """Return the reason why it cannot run on this machine, or an empty string."""
        if shutil.which("nvidia-smi") is None:
            return "needs an NVIDIA device"
        found = subprocess.run([sys.executable, "-c", f"import {self.library}"], capture_output=True).returncode == 0
        return "" if found else f"needs {self.library}"


def _torch(name: str, configuration: str) -> GpuProgram:
    environ = (("PYTORCH_CUDA_ALLOC_CONF", configuration),) if configuration else ()
    return GpuProgram(name, "torch", TORCH.format(block=256, blocks=16), environ)


PROGRAMS = (
    _torch("torch-native", ""),
    _torch("torch-expandable", "expandable_segments:True"),
    _torch("torch-async", "backend:cudaMallocAsync"),
    GpuProgram("cupy", "cupy", CUPY.format(block=256, blocks=16)),
)


@contextlib.contextmanager
def running(daemon: RunningDaemon, program: GpuProgram, workload: str) -> Iterator[int]:
    """Run the program with the agent, wait until its memory is reported, and yield its pid."""
    command = [sys.executable, "-m", "gpumond", "run", "--workload", workload, "--"]
    command += [sys.executable, "-c", program.script]
    environ = daemon.environ | dict(program.environ)
    with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        ready_at = time.time()
        until(lambda: reported(daemon, workload, ready_at + REPORT_SECONDS), 60)
        try:
            yield process.pid
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(timeout=60)


def reported(daemon: RunningDaemon, workload: str, since: float) -> bool:
    """Return whether there is a report made after a time; an earlier one may be incomplete."""
    snapshot = daemon.get("snapshot")
    own = [report for report in snapshot["reports"] if report["workload"] == workload and report["pools"]]
    return any(snapshot["taken_at"] - report["age_seconds"] > since for report in own)


def flush(daemon: RunningDaemon, program: GpuProgram) -> dict[str, Any]:
    """Run the program, flush it, and return the figures of receipt and ledger."""
    with running(daemon, program, program.name) as pid:
        lines = until(lambda: shares(daemon, pid))
        used = daemon.value("gpumond_process_memory_used_bytes", pid=str(pid))
        status, answer, _ = daemon.flush(target={"pid": pid})
    assert status == 200, answer
    (receipt,) = answer["receipts"]
    return {
        "outcome": receipt["outcome"],
        "expected": receipt["expected"],
        "held_bytes": receipt["before"]["held_bytes"],
        "released_bytes": receipt["released_bytes"],
        "driver_released_bytes": receipt["driver_released_bytes"],
        "raced": receipt["raced"],
        "duration_seconds": receipt["duration_seconds"],
        "driver_used_bytes": used,
        "shares": lines,
        "ledger_residual_bytes": None if used is None else used - sum(lines.values()),
    }


def shares(daemon: RunningDaemon, pid: int) -> dict[str, int]:
    """Return the shares of a process once the driver lists it and its pools are among them, else nothing."""
    lines = {line["share"]: line["used_bytes"] for line in daemon.get("ledger")["lines"] if line["pid"] == pid}
    return lines if {"live", "overhead"} <= lines.keys() else {}
