"""One daemon with 64 devices and 50 processes on each, read every second: polls, ticks, and twenty scrapers."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from bench.result import publish, spread
from bench.scrape import LATENCY_MICROSECONDS, connect, get, idle, sleepers
from tests.fakenvml import FakeDriver, build, machine
from tests.helpers.running import RunningDaemon, until

DEVICES, PROCESSES = 64, 50
POLLS, SCRAPERS, SECONDS = 40, 20, 60


def poll() -> None:
    """Run in a separate process, because the library is selected at its start."""
    from gpumond.devices.nvml.source import NvmlSource

    source, wall, processor = NvmlSource(), [], []
    source.open()
    for _ in range(POLLS):
        began, at_work = time.perf_counter(), time.process_time()
        reading = source.read()
        wall.append(time.perf_counter() - began)
        processor.append(time.process_time() - at_work)
        time.sleep(max(0.0, 1 - wall[-1]))  # sensors are read every few seconds
    source.close()
    assert sum(len(device.processes or ()) for device in reading.devices) == DEVICES * PROCESSES
    first = round(1e3 * wall[0], 1)
    print(json.dumps({"first_ms": first, "wall": spread(wall[1:]), "processor": spread(processor[1:])}))


def polls(driver: FakeDriver) -> dict[str, object]:
    command = [sys.executable, "-c", "from bench.large import poll; poll()"]
    done = subprocess.run(command, env={**os.environ, **driver.env}, stdout=subprocess.PIPE, text=True, check=True)
    polls_of_child: dict[str, object] = json.loads(done.stdout)
    return polls_of_child


def scraped(daemon: RunningDaemon, at_once: bool) -> dict[str, float]:
    """Measure this number of scrapers with one scrape per second each, at different times or at once."""
    rng, seconds = random.Random(1), list[float]()
    start = time.monotonic() + 0.5

    def scrape(phase: float) -> None:
        connection = connect(daemon)
        for number in range(SECONDS):
            time.sleep(max(0.0, start + phase + number - time.monotonic()))
            began = time.perf_counter()
            get(connection, "gzip")
            seconds.append(time.perf_counter() - began)

    scrapers = [threading.Thread(target=scrape, args=(0.0 if at_once else rng.random(),)) for _ in range(SCRAPERS)]
    for scraper in scrapers:
        scraper.start()
    for scraper in scrapers:
        scraper.join()
    return spread(seconds)


def families(page: bytes) -> dict[str, int]:
    """Return the bytes of each metric family, the largest first."""
    sizes = Counter[str]()
    for line in page.decode().splitlines():
        name = line.split(" ")[2] if line.startswith("#") else line.partition("{")[0].partition(" ")[0]
        sizes[name] += len(line) + 1
    return dict(sizes.most_common(12))


def ticks(daemon: RunningDaemon) -> dict[str, float]:
    count = daemon.value("gpumond_tick_duration_seconds_count") or 0
    total = daemon.value("gpumond_tick_duration_seconds_sum") or 0
    return {
        "ticks": count,
        "mean_ms": round(1e3 * total / count, 1),
        "skipped": daemon.value("gpumond_ticks_skipped_total") or 0,
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as name, sleepers(DEVICES * PROCESSES) as pids:
        directory = Path(name)
        driver = FakeDriver(directory, build(directory), machine(DEVICES, pids))
        driver.write()
        figures: dict[str, object] = {"devices": DEVICES, "processes": len(pids), "polls": polls(driver)}
        driver.slow(LATENCY_MICROSECONDS)
        driver.write()
        figures[f"polls_with_{LATENCY_MICROSECONDS}_us_a_call"] = polls(driver)
        daemon = RunningDaemon(directory / "daemon", "--source", "nvml", environ=driver.env)
        try:
            until(lambda: daemon.value("gpumond_driver_up"))
            time.sleep(10)
            page = get(connect(daemon), "identity")
            figures |= {
                "samples": len(daemon.series()),
                "bytes_plain": len(page),
                "bytes_gzip": len(get(connect(daemon), "gzip")),
                "bytes_of_the_largest_families": families(page),
                f"scrapes_of_{SCRAPERS}_at_1_hz": scraped(daemon, at_once=False),
                f"scrapes_of_{SCRAPERS}_at_once": scraped(daemon, at_once=True),
                "tick": ticks(daemon),
                **idle(daemon),
            }
        finally:
            daemon.stop()
    publish("large", figures)


if __name__ == "__main__":
    main()
