"""Growth of CPU time, memory, scrapes and ticks with devices, processes, agents, rules and series.

python -m bench.scaling [--seconds S] [--only SWEEPS] [--save]

Devices, processes, agents and rules are measured on a daemon over the fake driver, with one scrape a second for S
seconds (20). Series are measured in one process for each size: the page of frames in which all values change, without
the limit of a page. For each measure y, the exponent k of y = a + b x^k is fitted; above 1.1, the growth is
super-linear. Noise of a busy machine looks like growth. Agents require root, because they have users of their own.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.exporters import GPUMOND, ROOT, Running, pss, running, sample
from bench.result import publish
from bench.scrape import sleepers
from bench.swarm import start_agents
from bench.tables import exponents, scaling_table, super_linear
from bench.tick import CALM, UP, facts, rules
from gpumond.metrics.exposition import Encoding, Exposition
from gpumond.metrics.telemetry import Telemetry
from gpumond.tick.observe import observe
from tests.fakenvml import FakeDriver, build, machine
from tests.helpers.values import TickState, advance

DEVICES = (1, 2, 4, 8, 16, 32, 64)
PROCESSES = (0, 5, 16, 50, 160, 500)
AGENTS = (10, 50, 200, 1000, 5000)
RULES = (0, 10, 30, 100, 300, 1000)
PROCESSES_OF_A_PAGE = (7, 24, 90, 360, 1350)
"""Processes of each of 8 devices: 1,000 to 100,000 series."""
WARM_UP_SECONDS, AGENT_SECONDS = 10.0, 30.0
PAGES = 12
TICK_SUM, TICK_COUNT = (sample(f"gpumond_tick_duration_seconds_{name}") for name in ("sum", "count"))

Point = dict[str, float]


def watch(started: Running, x: float, seconds: float) -> Point:
    """Measure a daemon, with one scrape a second."""
    time.sleep(WARM_UP_SECONDS)
    connection, times = started.connect(), list[float]()
    page = started.get(connection, "identity")
    before, tick, ticks = sum(started.cpu()), *tick_totals(page)
    began = due = time.monotonic()
    while due < began + seconds:
        at = time.perf_counter()
        started.get(connection, "gzip")
        times.append(time.perf_counter() - at)
        due += 1
        time.sleep(max(0.0, due - time.monotonic()))
    passed, used = time.monotonic() - began, sum(started.cpu()) - before
    last_tick, last_ticks = tick_totals(started.get(connection, "identity"))
    return {
        "x": x,
        "cpu_ms": round(1e3 * used / passed, 2),
        "pss_mib": round(started.pss() / 2**20, 1),
        "scrape_ms": round(1e3 * statistics.median(times), 3),
        "tick_ms": round(1e3 * (last_tick - tick) / (last_ticks - ticks), 3),
        "page_bytes": len(page),
    }


def tick_totals(page: bytes) -> tuple[float, float]:
    seconds, ticks = TICK_SUM.search(page), TICK_COUNT.search(page)
    if seconds is None or ticks is None:
        raise SystemExit("the page has no duration of ticks")
    return float(seconds[1]), float(ticks[1])


class Machine:
    """Directory and library of the fake driver."""

    def __init__(self, directory: Path, seconds: float) -> None:
        self.directory, self.library, self.seconds = directory, build(directory), seconds

    def point(self, x: int, devices: int, processes: int, *options: str) -> Point:
        exporter = GPUMOND._replace(command=(*GPUMOND.command, *options))
        with sleepers(devices * processes) as pids:
            driver = FakeDriver(self.directory, self.library, machine(devices, pids))
            with running(exporter, self.directory / "daemon", driver.env) as started:
                started.first_data(devices)
                return watch(started, x, self.seconds)

    def devices(self, x: int) -> Point:
        """Return the point of x devices with 8 processes each."""
        return self.point(x, x, 8)

    def processes(self, x: int) -> Point:
        """Return the point of 4 devices with x processes each."""
        return self.point(x, 4, x)

    def rules(self, x: int) -> Point:
        """Return the point of x rules, besides the built-in ones, on 8 devices with 8 processes each."""
        own = {"value": "used_bytes", "above": "100GiB"}
        rules = [{"name": f"bench-{i}", "scope": ("process", "device")[i % 2], **own} for i in range(x)]
        config = self.directory / "rules.yaml"  # JSON is YAML
        config.write_text(json.dumps({"rules": rules}))
        return self.point(x, 8, 8, "--config", str(config))

    def agents(self, x: int) -> Point:
        """Return the point of x agents that report once a second, and whose processes the driver lists."""
        place = self.directory / f"agents-{x}"
        with start_agents(place, self.library, x) as (programs, driver):
            environ = {**driver.env, "GPUMOND_SOCKET_MODE": "0666"}
            with running(GPUMOND, place / "daemon", environ) as started:
                started.first_data(len(driver.devices))
                programs.send_reports(1, AGENT_SECONDS)
                programs.start_reports(1, WARM_UP_SECONDS + 2 * self.seconds)
                point = watch(started, x, self.seconds)
                programs.finish_reports()
                return point


def series(processes: int) -> Point:
    """Return the point of a page for 8 devices with this number of processes each, all with an agent."""
    command = [sys.executable, "-c", f"from bench.scaling import pages; pages({processes})"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    point: Point = json.loads(done.stdout)
    return point


def pages(processes: int) -> None:
    """Render pages in this process, and print the point."""
    exposition, state, snapshot = Exposition(Telemetry(), max_series=1_000_000), TickState(), None
    gc.freeze()
    gc.disable()  # as the daemon does, which collects between ticks
    ticks, renders, page = list[float](), list[float](), b""
    for number in range(PAGES):
        reading, reports = facts(number, processes)
        began = time.process_time()
        snapshot = observe(snapshot, UP, reading, reports, float(number), float(number))
        result = advance(state, rules(CALM), snapshot)
        state = result.memory
        ticks.append(time.process_time() - began)
        began = time.process_time()
        page = exposition.page(result.frame, Encoding.of("")).plain
        renders.append(time.process_time() - began)
        gc.collect()
    tick, render = (1e3 * statistics.median(own[2:]) for own in (ticks, renders))
    point = {
        "x": sum(not line.startswith(b"#") for line in page.splitlines()),
        "cpu_ms": round(tick + render, 2),
        "pss_mib": round(pss(os.getpid()) / 2**20, 1),
        "scrape_ms": round(render, 3),
        "tick_ms": round(tick, 3),
        "page_bytes": len(page),
    }
    print(json.dumps(point))


def main() -> None:
    load = round(os.getloadavg()[0], 1)
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--only", metavar="SWEEPS", default="devices,processes,agents,rules,series")
    parser.add_argument("--save", action="store_true")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        place.chmod(0o755)  # other users are the agents
        own = Machine(place, wanted.seconds)
        every: dict[str, tuple[str, Callable[[int], Point], Sequence[int]]] = {
            "devices": ("devices with 8 processes each", own.devices, DEVICES),
            "processes": ("processes on each of 4 devices", own.processes, PROCESSES),
            "agents": ("agents at 1 Hz", own.agents, AGENTS if os.geteuid() == 0 else ()),
            "rules": ("rules", own.rules, RULES),
            "series": ("series of a page, in one process", series, PROCESSES_OF_A_PAGE),
        }
        sweeps: dict[str, dict[str, object]] = {}
        for sweep in wanted.only.split(","):
            title, measure, sizes = every[sweep]
            points = [measured(measure, size, title) for size in sizes]
            if points:
                sweeps[title] = {"points": points, "exponents": exponents(points)}
            figures = {"load_average_before": load, "sweeps": sweeps, "super_linear": super_linear(sweeps)}
            publish("scaling", figures)
    print(scaling_table(figures))


def measured(measure: Callable[[int], Point], size: int, title: str) -> Point:
    point = measure(size)
    print(f"{title}: {size}: {point}", file=sys.stderr)
    return point


if __name__ == "__main__":
    main()
