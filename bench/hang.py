"""A driver call that hangs for 60 s: do scrapes go on, how soon is it said, how soon is it over."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from bench.result import publish, spread
from bench.scrape import connect, get
from tests.fakenvml import FakeDriver, build, machine
from tests.running import RunningDaemon, until

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
        seen: dict[str, float] = {}
        while "back_s" not in seen and time.perf_counter() - began < HANG_SECONDS + 30:
            before = time.perf_counter()
            body = get(connection, "identity")
            seconds.append(time.perf_counter() - before)
            note(seen, body, time.perf_counter() - began)
            time.sleep(0.05)
        daemon.stop()
    publish("hang", {"hang_s": HANG_SECONDS, "scrapes_meanwhile": spread(seconds), **seen})


def note(seen: dict[str, float], body: bytes, now: float) -> None:
    """The first moment at which each thing is true."""
    values = b"\ngpumond_device_memory_used_bytes{" in body
    if b"gpumond_driver_responsive 0.0" in body:
        seen.setdefault("unresponsive_said_after_s", round(now, 2))
    if not values:
        seen.setdefault("values_gone_after_s", round(now, 2))
    elif "values_gone_after_s" in seen:
        seen.setdefault("back_s", round(now, 2))


if __name__ == "__main__":
    main()
