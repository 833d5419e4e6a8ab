"""Repeated flushes of the demo's programs: predicted bytes, released bytes, and the driver's count."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from bench.result import publish, spread
from tests.helpers.running import RunningDaemon, until

ROUNDS = 20
PROGRAMS = 4


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory) / "gpumond.yaml"
        config.write_text("flush_cooldown: 0\n")
        daemon = RunningDaemon(Path(directory) / "daemon", "--config", str(config), command="demo")
        until(lambda: daemon.request("/-/ready")[0] == 200)
        until(lambda: len(daemon.get("agents")) == PROGRAMS)
        receipts = []
        for _ in range(ROUNDS):
            time.sleep(2)  # the programs fill their caches again
            receipts += daemon.flush(target={"all": True})[1]["receipts"]
        daemon.stop()
    quiet = [receipt for receipt in receipts if not receipt["raced"]]
    exact = [r for r in quiet if r["released_bytes"] == r["expected"]["likely"] == r["driver_released_bytes"]]
    publish(
        "flush",
        {
            "receipts": len(receipts),
            "raced": len(receipts) - len(quiet),
            "exact": len(exact),
            "inexact": [r for r in quiet if r not in exact],
            "released_bytes": sum(r["released_bytes"] for r in receipts),
            "duration": spread([r["duration_seconds"] for r in receipts]),
        },
    )


if __name__ == "__main__":
    main()
