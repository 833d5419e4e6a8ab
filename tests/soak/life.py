"""One life of a daemon in virtual time, with the real agents' socket, in a process that can be killed.

    python -m tests.soak.life DIRECTORY SOCKET BEGAN [full]

Moments come as JSON lines on stdin. What the receiver is told goes to stdout as it is told, and behind each tick what
the process has open. ``full``: the disk is so from the start.
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
from gpumond.agents.server import AgentServer
from gpumond.model.frame import Alert
from gpumond.model.snapshot import AgentReport, Reading, SourceState
from gpumond.protocol.messages import from_json
from gpumond.store.codecs import to_text
from tests.soak.daemon_parts import Pager, SimulatedDaemon
from tests.soak.world import EPOCH

STORE_BYTES = 1 << 20
HEAR_SECONDS, LOOK_SECONDS = 20.0, 0.001
MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Moment:
    """The state at a tick. ``agents`` have sent ``mark`` in their reports."""

    elapsed: float
    wall: float
    state: SourceState
    reading: Reading | None
    agents: int
    mark: str
    disk_full: bool
    receiver_down: bool


class Told:
    """The world as it was told last, and as agents say over their socket; elapsed time begins with this life."""

    def __init__(self, began: float, listener: socket.socket) -> None:
        self.dice = Random(began)
        self.elapsed, self.wall = 0.0, EPOCH
        self.receiver_down = False
        self.state = SourceState(name="sim", up=False, responsive=True)
        self._began = began
        self.intake = AgentServer(listener, clock=lambda: self._began + self.elapsed)

    def see(self, moment: Moment) -> None:
        self._moment = moment
        self.elapsed, self.wall = moment.elapsed - self._began, moment.wall
        self.state, self.receiver_down = moment.state, moment.receiver_down

    def reading(self) -> Reading | None:
        return self._moment.reading

    def reports(self) -> tuple[AgentReport, ...]:
        return self.intake.reports()

    async def all_heard(self) -> None:
        while sum(self._moment.mark in report.frameworks for report in self.reports()) < self._moment.agents:
            await asyncio.sleep(LOOK_SECONDS)


class Loud(Pager):
    """Says what it is told, before the outbox knows that it was."""

    async def send(self, raised: Sequence[Alert], resolved: Sequence[Alert]) -> None:
        await super().send(raised, resolved)
        say(raised=[to_text(alert) for alert in raised], resolved=[to_text(alert) for alert in resolved])


def say(**words: object) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


def fill(full: bool) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 if full else most, most))


def opened() -> dict[str, int]:
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "rss": rss(os.getpid()),
    }


async def live(directory: Path, path: Path, began: float, full: bool) -> None:
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(128)
    told = Told(began, listener)
    daemon = SimulatedDaemon(directory, told, STORE_BYTES, began, Loud(told), told.intake)
    lines = asyncio.StreamReader(MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    fill(full)
    async with daemon.started():
        say(**opened())
        while line := await lines.readline():
            moment = from_json(Moment, line)
            told.see(moment)
            fill(moment.disk_full)
            await asyncio.wait_for(told.all_heard(), HEAR_SECONDS)
            await daemon.tick()
            await daemon.edit()
            say(**opened())


if __name__ == "__main__":
    logging.getLogger("gpumond.alerting.receivers").setLevel(logging.ERROR)  # a receiver that is down is part of it
    asyncio.run(live(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), full=sys.argv[4:] == ["full"]))
