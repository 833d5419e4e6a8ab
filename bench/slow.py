"""A flood of slow connections: 10,000 over TCP that send single bytes and reconnect, and 5,000 agents without a hello.

Scrapes are measured meanwhile, each on its own connection: from the address of the flood, and from another. The flood
runs in a process of its own, so the figures are those of the daemon.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import resource
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench.result import publish, spread
from bench.scrape import children, cpu_seconds, rss
from tests.helpers.running import RunningDaemon, until

CONNECTIONS, AGENTS = 10_000, 5_000
CONNECTIONS_PER_SECOND = 1_000
DURATION_SECONDS = 40.0
REQUEST_STARTS = (b"", b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ", b"POST /api/v1/rules/preview HTTP/1.1\r\n")


class Flood:
    """Opens connections, sends a byte on each every few seconds, and replaces each that is closed."""

    def __init__(self, port: int, sources: int, agents: str) -> None:
        self.port, self.sources, self.agents = port, sources, agents
        self.selector = selectors.DefaultSelector()
        self.since: dict[socket.socket, float] = {}
        self.lifetimes: list[float] = []
        self.opened = self.most = self.refused = 0

    def run(self, seconds: float) -> dict[str, object]:
        half_open = [self.agent() for _ in range(AGENTS)]
        began = time.monotonic()
        while (now := time.monotonic()) - began < seconds:
            allowed = int(CONNECTIONS_PER_SECOND * (now - began + 1))
            while len(self.since) < CONNECTIONS and self.opened < allowed:
                self.open(now)
            self.most = max(self.most, len(self.since))
            for key, _ in self.selector.select(0.05):
                self.closed(key.fileobj)  # type: ignore[arg-type]
            for connection in list(self.since)[int(now * 20) % 80 :: 80]:
                with contextlib.suppress(OSError):
                    connection.send(b"x")
        longest = max([*self.lifetimes, *(now - since for since in self.since.values())])
        for connection in half_open:
            connection.close()
        return {
            "opened": self.opened,
            "refused_at_connect": self.refused,
            "open_at_once_at_most": self.most,
            "closed_by_the_daemon": len(self.lifetimes),
            "longest_life_s": round(longest, 2),
        }

    def open(self, now: float) -> None:
        connection = socket.socket()
        connection.setblocking(False)
        number = self.opened % self.sources
        with contextlib.suppress(OSError):
            connection.bind((f"127.1.{number // 250}.{number % 250 + 1}" if self.sources > 1 else "127.0.0.1", 0))
        self.opened += 1
        connection.connect_ex(("127.0.0.1", self.port))
        with contextlib.suppress(OSError):
            connection.send(REQUEST_STARTS[self.opened % len(REQUEST_STARTS)])
        self.since[connection] = now
        self.selector.register(connection, selectors.EVENT_READ)

    def closed(self, connection: socket.socket) -> None:
        try:
            if connection.recv(4096):
                return  # an answer: the close follows
        except BlockingIOError:
            return
        except ConnectionRefusedError:
            self.refused += 1
        except OSError:
            pass
        self.lifetimes.append(time.monotonic() - self.since.pop(connection))
        self.selector.unregister(connection)
        connection.close()

    def agent(self) -> socket.socket:
        agent = socket.socket(socket.AF_UNIX)
        agent.setblocking(False)
        agent.connect_ex(self.agents)
        return agent


def scrapes(daemon: RunningDaemon, source: str, seconds: float) -> Iterator[float]:
    """Time scrapes, each on its own connection. Exits if one is refused or has another status."""
    end = time.monotonic() + seconds
    address = daemon.url.removeprefix("http://")
    while time.monotonic() < end:
        began = time.perf_counter()
        connection = http.client.HTTPConnection(address, timeout=30, source_address=(source, 0))
        connection.request("GET", "/metrics", headers={"Accept-Encoding": "gzip"})
        answer = connection.getresponse()
        answer.read()
        connection.close()
        if answer.status != 200:
            raise SystemExit(f"a scrape was answered {answer.status}")
        yield time.perf_counter() - began
        time.sleep(0.05)


def measure(directory: Path, sources: int) -> dict[str, object]:
    directory.mkdir()
    (directory / "cards").mkdir()
    daemon = RunningDaemon(
        directory / "daemon", "--source", "sim", environ={"GPUMOND_SIM_DIR": str(directory / "cards")}
    )
    try:
        until(lambda: daemon.value("gpumond_driver_up"))
        quiet = list(scrapes(daemon, "127.0.0.1", 5))
        family = [daemon.process.pid, *children(daemon.process.pid)]
        before, lines = sum(map(cpu_seconds, family)), count_lines(daemon)
        command = [sys.executable, "-m", "bench.slow", "flood", daemon.url.rpartition(":")[2], str(sources)]
        flood = subprocess.Popen([*command, str(daemon.socket)], stdout=subprocess.PIPE, text=True)
        time.sleep(2)
        same, other, memory = [], [], 0
        while flood.poll() is None:
            same += scrapes(daemon, "127.0.0.1", 0.5)
            other += scrapes(daemon, "127.0.0.77", 0.5)
            memory = max(memory, sum(map(rss, family)))
        counts = flood.communicate()[0]
        return {
            "flood": dict(pair.split("=") for pair in counts.split()),
            "scrapes_before": spread(quiet),
            "scrapes_from_the_floods_address" if sources == 1 else "scrapes_from_127.0.0.1": spread(same),
            "scrapes_from_another_address": spread(other),
            "rss_mib_at_most": round(memory / 2**20, 1),
            "log_lines_a_second": round((count_lines(daemon) - lines) / DURATION_SECONDS, 2),
            "cpu_share_of_a_core": round((sum(map(cpu_seconds, family)) - before) / DURATION_SECONDS, 2),
        }
    finally:
        daemon.stop()


def count_lines(daemon: RunningDaemon) -> int:
    return len(daemon.log.read_text().splitlines())


def main() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))
    if sys.argv[1:2] == ["flood"]:
        os.nice(10)  # it represents other machines, which have processors of their own
        figures = Flood(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]).run(DURATION_SECONDS)
        print(" ".join(f"{name}={value}" for name, value in figures.items()))
        return
    with tempfile.TemporaryDirectory() as directory:
        figures = {
            "connections": CONNECTIONS,
            "opened_a_second": CONNECTIONS_PER_SECOND,
            "agents_half_open": AGENTS,
            "load_average_before": round(os.getloadavg()[0], 1),
            "nice": os.nice(0),
            "from_one_address": measure(Path(directory) / "one", 1),
            "from_1000_addresses": measure(Path(directory) / "many", 1000),
        }
    publish("slow", figures)


if __name__ == "__main__":
    main()
