"""On a real device: prediction, receipt and ledger of each program of tests/gpu/gpu_programs.py."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from bench.result import publish
from tests.gpu.gpu_programs import PROGRAMS, flush
from tests.helpers.running import RunningDaemon, until


def main() -> None:
    device = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
    )
    figures: dict[str, object] = {"card": device.stdout.strip()}
    with tempfile.TemporaryDirectory() as directory:
        daemon = RunningDaemon(Path(directory) / "daemon", "--source", "nvml")
        until(lambda: daemon.request("/-/ready")[0] == 200, 60)
        for program in PROGRAMS:
            reason = program.missing()
            figures[program.name] = {"skipped": reason} if reason else flush(daemon, program)
        daemon.stop()
    publish("gpu", figures)


if __name__ == "__main__":
    main()
