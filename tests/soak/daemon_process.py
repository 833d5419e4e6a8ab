"""Daemon in virtual time, with the real agents' socket, in a process that can be killed.

python -m tests.soak.daemon_process DIRECTORY SOCKET BEGAN [full]

Each line on stdin is a tick in JSON. The receiver's notifications are written to stdout as they are sent, and the
resources of the process after each tick. ``full``: the disk is full from the start.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from bench.scrape import rss
from gpumond.facts.frame import Alert
from gpumond.facts.messages import from_json
from gpumond.facts.snapshot import AgentReport, Reading, SourceState
from gpumond.programs.agent_server import AgentServer
from gpumond.store.table import to_text
from tests.helpers.simulated_daemon import CountingReceiver, SimulatedDaemon
from tests.helpers.world import EPOCH

STORE_BYTES = 1 << 20
RECEIVE_SECONDS, POLL_SECONDS = 20.0, 0.001
MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class TickInput:
    """Input of a tick. ``agents`` agents have sent ``mark`` in their reports."""

    elapsed: float
    wall: float
    state: SourceState
    reading: Reading | None
    agents: int
    mark: str
    disk_full: bool
    receiver_down: bool


class ReportedWorld:
    """The world as of the last tick, with the reports that agents sent over their socket. Elapsed time begins with this
    process.
    """

    def __init__(self, began: float, listener: socket.socket) -> None:
        self.rng = Random(began)
        self.elapsed, self.wall = 0.0, EPOCH
        self.receiver_down = False
        self.state = SourceState(name="sim", up=False, responsive=True)
        self._began = began
        self.server = AgentServer(listener, clock=lambda: self._began + self.elapsed)

    def start_tick(self, tick: TickInput) -> None:
        self._tick = tick
        self.elapsed, self.wall = tick.elapsed - self._began, tick.wall
        self.state, self.receiver_down = tick.state, tick.receiver_down

    def reading(self) -> Reading | None:
        return self._tick.reading

    def reports(self) -> tuple[AgentReport, ...]:
        return self.server.reports()

    async def all_reports_received(self) -> None:
        while sum(self._tick.mark in report.frameworks for report in self.reports()) < self._tick.agents:
            await asyncio.sleep(POLL_SECONDS)


class PrintingReceiver(CountingReceiver):
    """Write each notification to stdout before the outbox knows that it was sent."""

    async def send(self, raised: Sequence[Alert], resolved: Sequence[Alert]) -> None:
        await super().send(raised, resolved)
        write_line(raised=[to_text(alert) for alert in raised], resolved=[to_text(alert) for alert in resolved])


def write_line(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def fill(full: bool) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 if full else most, most))


def resources() -> dict[str, int]:
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "rss": rss(os.getpid()),
    }


async def run(directory: Path, path: Path, began: float, full: bool) -> None:
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(128)
    world = ReportedWorld(began, listener)
    daemon = SimulatedDaemon(directory, world, STORE_BYTES, began, PrintingReceiver(world), world.server)
    lines = asyncio.StreamReader(MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    fill(full)
    async with daemon.started():
        write_line(**resources())
        while line := await lines.readline():
            tick = from_json(TickInput, line)
            world.start_tick(tick)
            fill(tick.disk_full)
            await asyncio.wait_for(world.all_reports_received(), RECEIVE_SECONDS)
            await daemon.tick()
            await daemon.edit()
            write_line(**resources())


if __name__ == "__main__":
    logging.getLogger("gpumond.features.alerts.receivers").setLevel(
        logging.ERROR
    )  # such a receiver is part of the test
    asyncio.run(run(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), full=sys.argv[4:] == ["full"]))
