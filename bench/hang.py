"""A driver call for one device that hangs for 60 s: scrapes during it, time to its report, time to recovery."""

from __future__ import annotations

import re
import tempfile
import time
from pathlib import Path

from bench.result import publish, spread
from bench.scrape import connect, get
from tests.fakenvml import FakeDriver, build, machine
from tests.helpers.running import RunningDaemon, until

HANG_SECONDS = 60


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        driver = FakeDriver(Path(directory), build(Path(directory)), machine(8))
        driver.write()
        daemon = RunningDaemon(Path(directory) / "daemon", "--source", "nvml", environ=driver.env)
        until(lambda: daemon.value("gpumond_device_memory_used_bytes", gpu="0"))
        driver.hang("nvmlDeviceGetMemoryInfo_v2", 0, seconds=HANG_SECONDS, times=1)
        driver.write()
        began, connection = time.perf_counter(), connect(daemon)
        seconds: list[float] = []
        first_times: dict[str, float] = {}
        healed = False
        while "back_s" not in first_times and time.perf_counter() - began < HANG_SECONDS + 30:
            before = time.perf_counter()
            body = get(connection, "identity")
            seconds.append(time.perf_counter() - before)
            note(first_times, body, time.perf_counter() - began)
            if "unresponsive_said_after_s" in first_times and not healed:
                healed = True  # other processes would hang again; the first one continues to hang
                driver.heal()
                driver.write()
            time.sleep(0.05)
        daemon.stop()
    publish("hang", {"hang_s": HANG_SECONDS, "scrapes_meanwhile": spread(seconds), **first_times})


def note(first_times: dict[str, float], body: bytes, now: float) -> None:
    """Record the first time at which each condition is true; device 0 is the one that hangs."""
    hung, others = (
        re.search(rb'^gpumond_device_memory_used_bytes\{gpu="%d"' % gpu, body, re.MULTILINE) is not None
        for gpu in (0, 1)
    )
    if b"gpumond_driver_responsive 0.0" in body:
        first_times.setdefault("unresponsive_said_after_s", round(now, 2))
    if not hung:
        first_times.setdefault("values_gone_after_s", round(now, 2))
    if others and "values_gone_after_s" in first_times:
        first_times.setdefault("others_back_s", round(now, 2))
    if hung and "values_gone_after_s" in first_times:
        first_times.setdefault("back_s", round(now, 2))


if __name__ == "__main__":
    main()
