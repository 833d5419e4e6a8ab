"""A daemon over the fake driver with 8 devices and 8 or 64 processes each: scrapes, processor time, memory, start."""

from __future__ import annotations

import compileall
import contextlib
import http.client
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench.result import publish, spread
from tests.fakenvml import FakeDriver, build, machine
from tests.helpers.running import RunningDaemon, until

GPUMOND = Path(__file__).resolve().parents[1] / "gpumond"
SCRAPES = 500
FRESH_SCRAPES = 30
CPU_SECONDS = 30
LATENCY_MICROSECONDS = 20
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def compile_daemon() -> None:
    """Write the bytecode that an installed package has. The environment may keep Python from doing so."""
    compileall.compile_dir(GPUMOND, quiet=1)


@contextlib.contextmanager
def sleepers(count: int) -> Iterator[list[int]]:
    running = [subprocess.Popen(["sleep", "3600"]) for _ in range(count)]
    try:
        yield [process.pid for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()


def measure(directory: Path, library: Path, processes: int) -> dict[str, object]:
    with sleepers(8 * processes) as pids:
        driver = FakeDriver(directory, library, machine(8, pids))
        driver.slow(LATENCY_MICROSECONDS)
        driver.write()
        began = time.perf_counter()
        daemon = RunningDaemon(directory / "daemon", "--source", "nvml", environ=driver.env)
        first_200 = time.perf_counter() - began
        until(lambda: daemon.value("gpumond_driver_up"))
        first_data = time.perf_counter() - began
        try:
            return {
                "samples": len(daemon.series()),
                "start_to_first_200_s": round(first_200, 3),
                "start_to_first_data_s": round(first_data, 3),
                "first_scrape_of_a_frame": spread(fresh_scrape_seconds(daemon)),
                "further_scrapes_plain": spread(scrape(daemon, "identity")),
                "further_scrapes_gzip": spread(scrape(daemon, "gzip")),
                "bytes_plain": len(get(connect(daemon), "identity")),
                "bytes_gzip": len(get(connect(daemon), "gzip")),
                **idle_figures(daemon),
            }
        finally:
            daemon.stop()


def connect(daemon: RunningDaemon) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(daemon.url.removeprefix("http://"), timeout=10)


def get(connection: http.client.HTTPConnection, encoding: str) -> bytes:
    connection.request("GET", "/metrics", headers={"Accept-Encoding": encoding})
    return connection.getresponse().read()


def scrape(daemon: RunningDaemon, encoding: str) -> list[float]:
    """Time sequential scrapes; the first ones of a new frame are omitted."""
    connection, seconds, last = connect(daemon), [], b""
    while len(seconds) < SCRAPES:
        began = time.perf_counter()
        body = get(connection, encoding)
        took = time.perf_counter() - began
        if body == last:
            seconds.append(took)
        last = body
    return seconds


def fresh_scrape_seconds(daemon: RunningDaemon) -> list[float]:
    """Time one scrape of each new frame, as Prometheus does."""
    connection, seconds = connect(daemon), []
    for _ in range(FRESH_SCRAPES):
        seq = daemon.get("status")["snapshot_seq"]
        until(lambda seq=seq: daemon.get("status")["snapshot_seq"] > seq)
        began = time.perf_counter()
        get(connection, "gzip")
        seconds.append(time.perf_counter() - began)
    return seconds


def idle_figures(daemon: RunningDaemon) -> dict[str, object]:
    """Measure processor time of daemon and collector with one scrape a second, and their memory."""
    family = [daemon.process.pid, *children(daemon.process.pid)]
    connection, before = connect(daemon), sum(map(cpu_seconds, family))
    for _ in range(CPU_SECONDS):
        get(connection, "gzip")
        time.sleep(1)
    used = sum(map(cpu_seconds, family)) - before
    return {
        "cpu_s_per_minute_at_1_hz_scraped": round(used * 60 / CPU_SECONDS, 2),
        "rss_mib": [round(rss(pid) / 2**20, 1) for pid in family],
    }


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process, and of those that it has started and that have ended. Raises OSError."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / TICKS_PER_SECOND


def rss(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    compile_daemon()
    with tempfile.TemporaryDirectory() as directory:
        library = build(Path(directory))
        figures: dict[str, object] = {"nvml_latency_us": LATENCY_MICROSECONDS}
        for processes in (8, 64):
            place = Path(directory) / str(processes)
            place.mkdir()
            figures[f"8x{processes}"] = measure(place, library, processes)
    publish("scrape", figures)


if __name__ == "__main__":
    main()
