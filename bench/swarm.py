"""Thousands of agents of one daemon: processor time, lost reports, and the effect of a restart and of a flood.

python -m bench.swarm [steady] [alone] [storm] [flood] [--save]

It requires root, because each program has its own user. Every agent is a process, 40 for each user, spread over the
eight devices of the fake driver, which lists them all. The daemon has its own limits and the priority of its systemd
unit (nice -5).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.result import publish, spread
from bench.scrape import children, connect, cpu_seconds, get, rss
from tests.fakenvml import FakeDriver, build, machine
from tests.helpers.running import RunningDaemon, Series, series_of, until

AGENTS_OF_A_USER = 40
PROBE_UID, FLOOD_UID, OTHER_AGENTS = 60_001, 65_533, 20
DURATION_SECONDS = 12
RESTART_SECONDS = 20
CONNECTING_SECONDS = 6
IDLE_SECONDS = 6
TICKS_SECONDS = 2
"""Reports are counted with the tick."""
REPORTS = "gpumond_agent_reports_total"


class AgentProcesses:
    """Processes of the agents, and the counts of their reports."""

    def __init__(self, socket: Path, agents: int) -> None:
        command = [sys.executable, "-S", "-m", "bench.many_agents", str(socket), str(agents), str(AGENTS_OF_A_USER)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pids: list[int] = self._answer()

    def start_reports(self, hz: float, seconds: float, **options: int) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps({"hz": hz, "seconds": seconds, **options}) + "\n")
        self.process.stdin.flush()

    def send_reports(self, hz: float, seconds: float) -> dict[str, Any]:
        self.start_reports(hz, seconds)
        return self.finish_reports()

    def finish_reports(self) -> dict[str, Any]:
        """Return the result at the finish_reports."""
        answer: dict[str, Any] = self._answer()
        return answer

    def _answer(self) -> Any:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("the agent processes have ended")
        return json.loads(line)

    def stop(self) -> None:
        """Kill the senders, possibly within a message; each program ends when its sender has ended."""
        self.process.terminate()
        self.process.communicate()


@contextlib.contextmanager
def start_agents(
    directory: Path, library: Path, agents: int, listed: bool = True
) -> Iterator[tuple[AgentProcesses, FakeDriver]]:
    """Start programs on the devices of a fake driver, without a daemon. ``listed``: the driver lists them, too."""
    directory.mkdir()
    processes = AgentProcesses(directory / "daemon" / "agent.sock", agents)
    try:
        driver = FakeDriver(directory, library, machine(8, processes.pids if listed else ()))
        driver.write()
        yield processes, driver
    finally:
        processes.stop()


class SwarmDaemon(RunningDaemon):
    """Daemon over the fake driver, accessible to every user."""

    def __init__(self, directory: Path, driver: FakeDriver) -> None:
        environ = {**driver.env, "GPUMOND_SOCKET_MODE": "0666"}
        super().__init__(
            directory / "daemon",
            "--source",
            "nvml",
            environ=environ,
            around=("nice", "-n", str(min(0, -5 - os.nice(0)))),
        )
        until(lambda: self.value("gpumond_driver_up"))
        self.family = [self.process.pid, *children(self.process.pid)]

    def cpu(self) -> float:
        return sum(map(cpu_seconds, self.family))

    def rss_mib(self) -> float:
        return round(sum(map(rss, self.family)) / 2**20, 1)

    def counters(self) -> dict[str, float]:
        """Return the figures that concern agents."""
        names = (
            "gpumond_agent_connections_rejected_total",
            "gpumond_ticks_skipped_total",
            "gpumond_series_dropped_total",
            REPORTS,
        )
        return {
            "_".join([name, *(value for _, value in labels)]): value
            for (name, labels), value in self.samples(*names).items()
        }

    def agents(self) -> int:
        return int(sum(self.samples("gpumond_agents").values()))

    def samples(self, *names: str) -> Series:
        """Return the samples of these names: to parse a page with all takes seconds."""
        beginnings = tuple(name.encode() for name in names)
        lines = [line for line in self.request("/metrics")[1].splitlines() if line.startswith(beginnings)]
        return series_of(b"\n".join([*lines, b""]))


@contextlib.contextmanager
def probe_during(daemon: RunningDaemon, seconds: float) -> Iterator[dict[str, object]]:
    """Measure the time that reports wait in the socket; the yielded dictionary is filled at the finish_reports."""
    command = [sys.executable, "-m", "bench.probe", str(daemon.socket), str(PROBE_UID), str(seconds)]
    probe = subprocess.Popen(["nice", "-n", "-10", *command], stdout=subprocess.PIPE, text=True)
    found: dict[str, object] = {}
    yield found
    counts = json.loads(probe.communicate()[0])
    found |= {**spread(counts["seconds"]), "failed": counts["failed"]}


def steady(directory: Path, processes: AgentProcesses, driver: FakeDriver, rates: Sequence[float]) -> dict[str, object]:
    """Run without reports, then with reports of all agents at these rates, one after another, then with reports that
    each repeat the last one.
    """
    daemon = SwarmDaemon(directory, driver)
    try:
        time.sleep(2)
        before, memory = daemon.cpu(), daemon.rss_mib()
        time.sleep(IDLE_SECONDS)
        figures: dict[str, object] = {
            "cpu_share_of_a_core_without_agents": round((daemon.cpu() - before) / IDLE_SECONDS, 3),
            "rss_mib_without_agents": memory,
        }
        processes.send_reports(1, CONNECTING_SECONDS)
        for hz in rates:
            figures[f"{hz:g}_hz"] = rate(daemon, processes, hz)
        figures["1_hz_unchanged"] = rate(daemon, processes, 1, variants=1)
        page = get(connect(daemon), "identity")
        return figures | {
            "rss_mib": daemon.rss_mib(),
            "samples": sum(not line.startswith(b"#") for line in page.splitlines()),
            "bytes_plain": len(page),
            "bytes_gzip": len(get(connect(daemon), "gzip")),
        }
    finally:
        daemon.stop()


def rate(daemon: SwarmDaemon, processes: AgentProcesses, hz: float, **options: int) -> dict[str, object]:
    """Run with one scrape."""
    time.sleep(TICKS_SECONDS)
    reports = daemon.counters()[REPORTS]
    processes.start_reports(hz, DURATION_SECONDS, **options)
    before = daemon.cpu()
    time.sleep(DURATION_SECONDS / 2)
    get(connect(daemon), "gzip")
    time.sleep(DURATION_SECONDS / 2)
    used = daemon.cpu() - before
    counts = processes.finish_reports()
    time.sleep(TICKS_SECONDS)
    counters = daemon.counters()
    received = counters.pop(REPORTS) - reports
    return {
        "cpu_share_of_a_core": round(used / DURATION_SECONDS, 3),
        "reports_sent": counts["reports"] - counts["replaced"],
        "reports_heard": int(received),
        "agents_known": daemon.agents(),
        **counters,
        "crowd": counts,
    }


def alone(directory: Path, library: Path, agents: int) -> dict[str, object]:
    """Measure the cost of agents without processes that the driver lists."""
    with start_agents(directory, library, agents, listed=False) as (processes, driver):
        daemon = SwarmDaemon(directory, driver)
        try:
            processes.send_reports(1, CONNECTING_SECONDS)
            return rate(daemon, processes, 1) | {"rss_mib": daemon.rss_mib()}
        finally:
            daemon.stop()


def storm(directory: Path, processes: AgentProcesses, driver: FakeDriver) -> dict[str, object]:
    """Restart the daemon while the agents are connected."""
    daemon = SwarmDaemon(directory, driver)
    processes.send_reports(1, CONNECTING_SECONDS)
    known = daemon.agents()
    processes.start_reports(1, RESTART_SECONDS)
    time.sleep(3)
    stopped_at = time.monotonic()
    daemon.stop()
    gone_at = time.monotonic()
    daemon = SwarmDaemon(directory, driver)
    try:
        ready_at = time.monotonic()
        counts = processes.finish_reports()
        return {
            "agents_before": known,
            "stopped_after_s": round(gone_at - stopped_at, 2),
            "ready_after_s": round(ready_at - stopped_at, 2),
            "all_back_after_s": round(counts["last_connected_at"] - stopped_at, 2),
            "agents_after": daemon.agents(),
            "rss_mib": daemon.rss_mib(),
            "descriptors": len(os.listdir(f"/proc/{daemon.process.pid}/fd")),
            "log_of_descriptors": daemon.log.read_text().count("Too many open files"),
            **daemon.counters(),
            "crowd": counts,
        }
    finally:
        daemon.stop()


def flood(directory: Path, library: Path) -> dict[str, object]:
    """Flood the daemon while twenty agents of another user report at 1 Hz."""
    with start_agents(directory, library, OTHER_AGENTS) as (processes, driver):
        daemon = SwarmDaemon(directory, driver)
        try:
            processes.send_reports(1, 5)
            lines, before, memory = len(daemon.log.read_text().splitlines()), daemon.cpu(), daemon.rss_mib()
            command = [
                sys.executable,
                "-S",
                "-m",
                "bench.flood",
                str(daemon.socket),
                str(FLOOD_UID),
                str(DURATION_SECONDS),
            ]
            flood = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            time.sleep(2)
            processes.start_reports(1, DURATION_SECONDS - 5)
            with probe_during(daemon, DURATION_SECONDS - 6) as ingest:
                scrapes: list[float] = []
                while len(scrapes) < DURATION_SECONDS - 6:
                    began = time.perf_counter()
                    get(connect(daemon), "gzip")
                    scrapes.append(time.perf_counter() - began)
                    time.sleep(1)
            others = processes.finish_reports()
            used, memory = daemon.cpu() - before, daemon.rss_mib() - memory
            series = daemon.series()
            counts = json.loads(flood.communicate()[0])
            return {
                "flood": counts,
                "honest": others,
                "ingest_of_another_user": ingest,
                "scrapes": spread(scrapes),
                "series": len(series),
                "honest_agents_seen": sum(
                    value
                    for (name, labels), value in series.items()
                    if name == "gpumond_agents" and ("train" in str(labels))
                ),
                "cpu_share_of_a_core": round(used / DURATION_SECONDS, 3),
                "rss_mib_more": round(memory, 1),
                "log_lines_a_second": round((len(daemon.log.read_text().splitlines()) - lines) / DURATION_SECONDS, 1),
                **daemon.counters(),
            }
        finally:
            daemon.stop()


def main() -> None:
    wanted = {word for word in sys.argv[1:] if not word.startswith("-")} or {"steady", "alone", "storm", "flood"}
    if os.geteuid() != 0:
        raise SystemExit("bench.swarm needs root: each program has a user of its own")
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        place.chmod(0o755)
        library = build(place)
        figures: dict[str, object] = {
            "agents_of_a_user": AGENTS_OF_A_USER,
            "load_average_before": round(os.getloadavg()[0], 1),
        }
        if "steady" in wanted:
            with start_agents(place / "1000", library, 1000) as (processes, driver):
                figures["1000_agents"] = steady(place / "1000", processes, driver, (1, 10))
        if "alone" in wanted:
            figures["1000_agents_the_driver_lists_none"] = alone(place / "alone", library, 1000)
        if wanted & {"steady", "storm"}:
            with start_agents(place / "5000", library, 5000) as (processes, driver):
                if "steady" in wanted:
                    figures["5000_agents"] = steady(place / "5000", processes, driver, (1,))
                if "storm" in wanted:
                    figures["restart_with_5000_agents"] = storm(place / "5000", processes, driver)
        if "flood" in wanted:
            figures["one_user_floods"] = flood(place / "flood", library)
    publish("swarm", figures)


if __name__ == "__main__":
    main()
