"""Real programs on a real card, through `gpumond run`: what each of them holds is known by construction."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.running import RunningDaemon, until

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
class Scene:
    name: str
    library: str
    script: str
    environ: tuple[tuple[str, str], ...] = ()

    def missing(self) -> str:
        """Why it cannot run here; empty if it can."""
        if shutil.which("nvidia-smi") is None:
            return "needs an NVIDIA card"
        found = subprocess.run([sys.executable, "-c", f"import {self.library}"], capture_output=True).returncode == 0
        return "" if found else f"needs {self.library}"


def _torch(name: str, configuration: str) -> Scene:
    environ = (("PYTORCH_CUDA_ALLOC_CONF", configuration),) if configuration else ()
    return Scene(name, "torch", TORCH.format(block=256, blocks=16), environ)


SCENES = (
    _torch("torch-native", ""),
    _torch("torch-expandable", "expandable_segments:True"),
    _torch("torch-async", "backend:cudaMallocAsync"),
    Scene("cupy", "cupy", CUPY.format(block=256, blocks=16)),
)


@contextlib.contextmanager
def program(daemon: RunningDaemon, scene: Scene, workload: str) -> Iterator[int]:
    """The scene's program with the agent inside, once it holds its memory and has said so; gives its pid."""
    command = [sys.executable, "-m", "gpumond", "run", "--workload", workload, "--", sys.executable, "-c", scene.script]
    environ = daemon.environ | dict(scene.environ)
    with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        ready_at = time.time()
        until(lambda: reported(daemon, workload, ready_at + REPORT_SECONDS), 60)
        try:
            yield running.pid
        finally:
            assert running.stdin is not None
            running.stdin.close()
            running.wait(timeout=60)


def reported(daemon: RunningDaemon, workload: str, since: float) -> bool:
    """Return whether there is a report made after a time; an earlier one may be incomplete."""
    snapshot = daemon.get("snapshot")
    own = [report for report in snapshot["reports"] if report["workload"] == workload and report["pools"]]
    return any(snapshot["taken_at"] - report["age_seconds"] > since for report in own)


def flush(daemon: RunningDaemon, scene: Scene) -> dict[str, Any]:
    """Runs the scene, flushes it, and gives receipt and ledger as figures."""
    with program(daemon, scene, scene.name) as pid:
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
    """The process's lines, once the driver lists it and its agent's pools are among them."""
    lines = {line["share"]: line["used_bytes"] for line in daemon.get("ledger")["lines"] if line["pid"] == pid}
    return lines if {"live", "overhead"} <= lines.keys() else {}
