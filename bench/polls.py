"""100,000 readings of the NVML source over the fake driver: growth of descriptors, threads and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from bench.result import publish
from tests.fakenvml import FakeDriver, build, machine

POLLS, WARM = 100_000, 5_000


def poll() -> None:
    """Run in a separate process, because the library is selected at its start."""
    from gpumond.devices.nvml.source import NvmlSource

    source = NvmlSource()
    source.open()
    resources = {}
    for count in range(POLLS + 1):
        source.read()
        if count in (WARM, POLLS):
            resources[f"after_{count}"] = {
                "descriptors": len(os.listdir("/proc/self/fd")),
                "threads": threading.active_count(),
                "rss_kib": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024,
            }
    source.close()
    print(json.dumps(resources))


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        driver = FakeDriver(Path(directory), build(Path(directory)), machine(2, [os.getpid(), 1]))
        driver.write()
        command = [sys.executable, "-c", "from bench.polls import poll; poll()"]
        done = subprocess.run(command, env={**os.environ, **driver.env}, capture_output=True, text=True, check=True)
    publish("polls", {"polls": POLLS, **json.loads(done.stdout)})


if __name__ == "__main__":
    main()
