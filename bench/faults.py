"""A crash in the driver, and SIGTERM in every state of the driver: how soon are values back, how soon is it over."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from bench.result import publish
from tests.fakenvml import FakeDriver, build, machine
from tests.running import RunningDaemon, until

CRASHES = 10


def start(directory: Path, driver: FakeDriver) -> RunningDaemon:
    driver.write()
    return RunningDaemon(directory / "daemon", "--source", "nvml", environ=driver.env)


def crash(directory: Path, library: Path) -> list[float]:
    """Seconds from each crash, as the daemon notices it, to values that are newer than it."""
    driver = FakeDriver(directory, library, machine(8))
    daemon = start(directory, driver)
    until(lambda: daemon.value("gpumond_driver_up"))
    seconds = []
    for crashes in range(1, CRASHES + 1):
        driver.crash("nvmlDeviceGetMemoryInfo_v2", 1)
        driver.write()
        until(lambda: daemon.value("gpumond_driver_up", reason="crashed") == 0)
        began = time.perf_counter()
        driver.heal()
        driver.devices[1].used_bytes += 4096 * crashes
        driver.write()
        until(lambda: daemon.value("gpumond_device_memory_used_bytes", gpu="1") == driver.devices[1].used_bytes)
        seconds.append(round(time.perf_counter() - began, 3))
    daemon.stop()
    return seconds


def sigterm(directory: Path, library: Path, state: str) -> dict[str, float]:
    driver = FakeDriver(directory, library, machine(2))
    if state == "hangs in init":
        driver.hang("nvmlInitWithFlags")
        driver.hang("nvmlInit_v2")
    if state == "hangs in shutdown":
        driver.hang("nvmlShutdown")
    daemon = start(directory, driver)
    if state != "hangs in init":
        until(lambda: daemon.value("gpumond_driver_up"))
    if state == "hangs in a call":
        driver.hang()
        driver.write()
        until(lambda: daemon.value("gpumond_driver_responsive") == 0)
    began = time.perf_counter()
    status = daemon.stop()
    return {"exit": status, "seconds": round(time.perf_counter() - began, 2)}


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        library = build(directory)
        figures: dict[str, object] = {}
        for number, state in enumerate(("idle", "hangs in a call", "hangs in init", "hangs in shutdown")):
            place = directory / str(number)
            place.mkdir()
            figures[f"sigterm, driver {state}"] = sigterm(place, library, state)
        place = directory / "crash"
        place.mkdir()
        figures["crash_to_fresh_values_s"] = crash(place, library)
    publish("faults", figures)


if __name__ == "__main__":
    main()
