"""Memory, processor time and start of all processes of a daemon over the fake driver.

python -m bench.footprint [--save | --check]

The proportional set size (PSS) of a process counts a page that n processes map as 1/n. Anonymous pages belong to the
daemon's processes alone; pages of files are shared with every other Python process of the machine. ``--check`` measures
the case ``CHECKED`` and exits with 1 if it needs over 5% more anonymous memory than
``bench/results/footprint.json``. The cases with agents need root, because each program has its own user.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.exporters import pss
from bench.result import RESULTS, publish
from bench.scrape import LATENCY_MICROSECONDS, children, compile_daemon, connect, cpu_seconds, get, sleepers
from bench.swarm import start_agents
from tests.fakenvml import FakeDriver, build, machine
from tests.helpers.running import RunningDaemon, until

STARTS, SECONDS, EVERY_SECONDS = 3, 60, 5
TOLERANCE = 0.05
PROCESSES = {"8x8": 64, "8x64": 512}
AGENTS = {"48 agents": 48, "1000 agents": 1000}
CHECKED = "8x64"
WEB_UI_PATHS = ("/", "/api/v1/frame")


def pss_mib(pid: int, kind: str = "Pss") -> float:
    return pss(pid, kind) / 2**20


@contextmanager
def running(place: Path, driver: FakeDriver) -> Iterator[tuple[RunningDaemon, float]]:
    """Start a daemon, and yield it with the seconds until its first data."""
    environ = {**driver.env, "GPUMOND_SOCKET_MODE": "0666"}
    began = time.perf_counter()
    daemon = RunningDaemon(place, "--source", "nvml", environ=environ)
    try:
        until(lambda: daemon.value("gpumond_driver_up"), every=0.005)
        yield daemon, time.perf_counter() - began
    finally:
        daemon.stop()


def measure(daemon: RunningDaemon) -> dict[str, object]:
    """Observe a minute with a scrape every five seconds, then open the page."""
    family = {"daemon": daemon.process.pid, "driver": children(daemon.process.pid)[0]}
    connection, sums = connect(daemon), []
    before = {name: cpu_seconds(pid) for name, pid in family.items()}
    began = time.monotonic()
    for number in range(1, SECONDS // EVERY_SECONDS + 1):
        get(connection, "gzip")
        time.sleep(max(0.0, began + number * EVERY_SECONDS - time.monotonic()))
        sums.append(sum(map(pss_mib, family.values())))
    figures: dict[str, object] = {
        "pss_mib": round(sums[-1], 1),
        "pss_mib_at_most": round(max(sums), 1),
        "pss_mib_by_process": {name: round(pss_mib(pid), 1) for name, pid in family.items()},
        "anonymous_pss_mib": round(sum(pss_mib(pid, "Pss_Anon") for pid in family.values()), 1),
        "cpu_s_per_minute": {
            name: round((cpu_seconds(pid) - before[name]) * 60 / SECONDS, 2) for name, pid in family.items()
        },
    }
    for path in WEB_UI_PATHS:
        assert daemon.request(path)[0] == 200
    time.sleep(EVERY_SECONDS)
    return figures | {"pss_mib_after_the_page_was_opened": round(sum(map(pss_mib, family.values())), 1)}


def measure_without_agents(place: Path, library: Path, processes: int, starts: int) -> dict[str, object]:
    """Measure with processes that have no agent."""
    place.mkdir()
    with sleepers(processes) as pids:
        driver = FakeDriver(place, library, machine(8, pids))
        driver.slow(LATENCY_MICROSECONDS)
        driver.write()
        seconds = []
        for number in range(starts):
            with running(place / str(number), driver) as (_, took):
                seconds.append(took)
        with running(place / "daemon", driver) as (daemon, took):
            first = {"start_to_first_data_s": round(statistics.median([*seconds, took]), 3)}
            return first | measure(daemon)


def measure_with_agents(place: Path, library: Path, agents: int) -> dict[str, object]:
    """Measure with processes that report once a second."""
    with start_agents(place, library, agents) as (processes, driver), running(place / "daemon", driver) as (daemon, _):
        processes.start_reports(1, SECONDS + 30)
        until(lambda: sum(value for (name, _), value in daemon.series().items() if name == "gpumond_agents") == agents)
        return measure(daemon)


def main() -> None:
    compile_daemon()
    check_only = "--check" in sys.argv
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        place.chmod(0o755)
        library = build(place)
        if check_only:
            raise SystemExit(check(measure_without_agents(place / CHECKED, library, PROCESSES[CHECKED], 0)))
        figures = {
            name: measure_without_agents(place / name, library, processes, STARTS - 1)
            for name, processes in PROCESSES.items()
        }
        for name, agents in AGENTS.items() if os.geteuid() == 0 else ():
            figures[name] = measure_with_agents(place / str(agents), library, agents)
    publish("footprint", {"nvml_latency_us": LATENCY_MICROSECONDS, **figures})


def check(figures: dict[str, object]) -> int:
    """Print the difference from the record. Return the exit code."""
    recorded = json.loads((RESULTS / "footprint.json").read_text())
    version, own = recorded["machine"]["python"], sys.version.split()[0]
    if version.rpartition(".")[0] != own.rpartition(".")[0]:
        print(f"the record is of Python {version}, not {own}: nothing is compared")
        return 0
    before, now = (float(each["anonymous_pss_mib"]) for each in (recorded["figures"][CHECKED], figures))  # type: ignore[arg-type]
    change = now / before - 1
    hint = "  more than 5%" if change > TOLERANCE else "  renew with --save" if change < -TOLERANCE else ""
    print(f"anonymous memory, {CHECKED}: {before:.1f} -> {now:.1f} MiB {change:+.1%}{hint}")
    return int(change > TOLERANCE)


if __name__ == "__main__":
    main()
