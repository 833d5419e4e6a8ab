"""On a real card: prediction, receipt and ledger of each scene of tests/gpu/scenes.py."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from bench.result import publish
from tests.gpu.scenes import SCENES, flush
from tests.running import RunningDaemon, until


def main() -> None:
    card = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
    )
    figures: dict[str, object] = {"card": card.stdout.strip()}
    with tempfile.TemporaryDirectory() as directory:
        daemon = RunningDaemon(Path(directory) / "daemon", "--source", "nvml")
        until(lambda: daemon.request("/-/ready")[0] == 200, 60)
        for scene in SCENES:
            reason = scene.missing()
            figures[scene.name] = {"skipped": reason} if reason else flush(daemon, scene)
        daemon.stop()
    publish("gpu", figures)


if __name__ == "__main__":
    main()
