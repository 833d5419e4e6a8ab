"""Simulated days with real sockets, hostile messages and kills.

`World` and `Oracle` are in this process, the daemon is `daemon_process`. Each program of the world is a process, each
agent a connection. A kill -9 occurs in the middle of a tick, and the next daemon resumes from the store. The oracle
checks the notifications of the receiver.
"""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpumond.facts.alerts import Labels
from gpumond.facts.frame import Alert
from gpumond.facts.messages import Hello, Report, encode, to_json
from gpumond.facts.snapshot import Reading
from gpumond.host.machine import read_start_ticks
from gpumond.store.table import from_text
from tests.helpers.simulated_program import Process
from tests.helpers.world import TICK_SECONDS, World
from tests.soak.attackers import messages_of_connection
from tests.soak.daemon_process import TickInput
from tests.soak.incidents import Oracle, troubles
from tests.soak.week import DAY

KILL_RATIO = 1 / 250
"""Kills per tick."""
KILL_WITHIN_SECONDS = 0.03
HOSTILE_RATIO = 0.3
LEAVING_TICKS = 10
SLACK_SECONDS = 900.0
"""Additional delay that kills and a failing receiver may cause."""
WITHOUT_KILLS = ("xid-errors", "out-of-memory", "leak")
"""Incidents during which the daemon is not killed. No daemon reports an event that none has seen, and a leak as slow as
this one takes longer to be found again than its alert is held after a restart.
"""


class Programs:
    """Processes of the world's programs, by pid."""

    def __init__(self, path: Path) -> None:
        self._requests, its = socket.socketpair()
        command = [sys.executable, "-S", "-m", "tests.soak.relay", str(path)]
        self._relay = subprocess.Popen(command, stdin=its)
        its.close()
        self._controls: dict[int, socket.socket] = {}

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield pid and start of a new process each time."""
        while True:
            own, its = socket.socketpair()
            socket.send_fds(self._requests, [b"p"], [its.fileno()])
            its.close()
            pid = int(self._requests.recv(64))
            start = read_start_ticks(pid)
            assert start is not None
            self._controls[pid] = own
            yield pid, start

    def send(self, pid: int, line: bytes) -> None:
        self._controls[pid].sendall(line)

    def end(self, pid: int) -> None:
        self._controls.pop(pid).close()

    def close(self) -> None:
        for pid in list(self._controls):
            self.end(pid)
        self._requests.close()
        self._relay.wait(10)


class WorldOfProcesses(World):
    """World whose programs are processes."""

    def __init__(self, seed: int, programs: Programs) -> None:
        self._programs, self._introduced = programs, set[int]()
        self._counted = Counter[str]()
        super().__init__(seed, identities=iter(programs))

    def end(self, process: Process) -> None:
        super().end(process)
        self._gone(process.pid)

    def orphan(self, process: Process) -> None:
        super().orphan(process)
        self._gone(process.pid)

    def _gone(self, pid: int) -> None:
        self._introduced.discard(pid)
        self._programs.end(pid)

    def reading(self) -> Reading | None:
        """Return a reading with the Xid errors since the driver was opened."""
        reading = super().reading()
        if reading is None:
            return None
        xids = (replace(each, count=each.count - self._counted[each.device_uuid]) for each in reading.xids)
        return replace(reading, xids=tuple(each for each in xids if each.count))

    def reopen(self) -> None:
        """Another daemon opens the driver."""
        self._counted = Counter(self.xids)

    def end_all(self) -> None:
        for process in list(self._running.values()):
            self.end(process)

    def send_reports(self, mark: str) -> int:
        """Send the reports of all agents, and return their number."""
        reports = self.reports()
        for report in reports:
            if report.pid not in self._introduced:
                self._introduced.add(report.pid)
                self._programs.send(report.pid, encode(Hello(report.workload)))
            self._programs.send(report.pid, encode(Report(pools=report.pools, frameworks=(mark,))))
        return len(reports)


class DaemonProcess:
    """One daemon process. ``opened`` are its resources at the start, ``needs`` those at the last tick."""

    def __init__(self, directory: Path, path: Path, world: World) -> None:
        command = [sys.executable, "-m", "tests.soak.daemon_process", str(directory), str(path), str(world.elapsed)]
        command += ["full"] if world.disk_full else []
        with (directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, bufsize=1
            )
        assert self._process.stdin
        assert self._process.stdout
        self._input, self._output = self._process.stdin, self._process.stdout
        self.opened = self.needs = self._line()

    def start_tick(self, tick: TickInput) -> None:
        self._input.write(to_json(tick).decode() + "\n")

    def notifications(self) -> Iterator[dict[str, Any]]:
        """Return the notifications until the end of the tick."""
        while "descriptors" not in (line := self._line()):
            yield line
        self.needs = line

    def kill(self) -> list[dict[str, Any]]:
        """Return the notifications until a time."""
        self._process.kill()
        with self._process:
            return [json.loads(line) for line in self._output if line.endswith("\n") and "raised" in line]

    def ensure_ended(self) -> None:
        if self._process.poll() is None:
            self.kill()

    def end(self) -> None:
        self._input.close()
        with self._process:
            self._output.read()
        assert self._process.returncode == 0

    def _line(self) -> dict[str, Any]:
        line = self._output.readline()
        assert line, "the daemon has died; see its log"
        message: dict[str, Any] = json.loads(line)
        return message


class CheckedReceiver:
    """Receiver: the alerts that it believes to fire, and the number of repeated notifications."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle, self._firing = oracle, set[Labels]()
        self.counts = Counter[str]()

    def check(self, now: float, notifications: list[dict[str, Any]]) -> None:
        for message in notifications or [{"raised": [], "resolved": []}]:
            raised, resolved = ([from_text(Alert, text) for text in message[kind]] for kind in ("raised", "resolved"))
            new = [alert for alert in raised if alert.labels not in self._firing]
            self._firing |= {alert.labels for alert in new}
            over = [alert for alert in resolved if alert.labels in self._firing]
            self._firing -= {alert.labels for alert in over}
            self.counts.update(raised=len(new), resolved=len(over))
            self.counts.update(raised_again=len(raised) - len(new), resolved_again=len(resolved) - len(over))
            self._oracle.check(now, new, over)


def survive(directory: Path, days: float, seed: int = 1) -> dict[str, object]:
    """Return the figures of these days. Raises AssertionError if a daemon ends by itself."""
    path = directory / "agent.sock"
    programs = Programs(path)
    try:
        return _survive(directory, path, programs, days, seed)
    finally:
        programs.close()


def _survive(directory: Path, path: Path, programs: Programs, days: float, seed: int) -> dict[str, object]:
    world, oracle, rng = WorldOfProcesses(seed, programs), Oracle(slack=SLACK_SECONDS), random.Random(seed)
    receiver, counts = CheckedReceiver(oracle), Counter[str]()
    incident, began = troubles(world, oracle), time.monotonic()
    daemon, most = DaemonProcess(directory, path, world), 0
    try:
        for number in range(int(days * DAY / TICK_SECONDS)):
            world.advance()
            oracle.now = world.elapsed
            next(incident)
            if rng.random() < HOSTILE_RATIO:
                counts.update(hostile_frames=_attack(path, rng))
            daemon.start_tick(_tick_input(world, f"tick {number}"))
            if rng.random() < KILL_RATIO and not oracle.awaits(*WITHOUT_KILLS):
                time.sleep(rng.uniform(0, KILL_WITHIN_SECONDS))
                notifications = daemon.kill()
                counts.update(kills=1)
                world.reopen()
                daemon = DaemonProcess(directory, path, world)
            else:
                notifications = list(daemon.notifications())
                most = max(most, daemon.needs["rss"])
            receiver.check(world.elapsed, notifications)
        more = _remaining(world, daemon)
        daemon.end()
    finally:
        daemon.ensure_ended()
    return {
        "simulated_days": days,
        "ticks": int(days * DAY / TICK_SECONDS),
        "programs": world.programs,
        **counts,
        "alerts_expected": oracle.expected,
        "alerts_not_due_at_the_end": oracle.awaited,
        **{f"sent_{kind}": count for kind, count in receiver.counts.items()},
        "wrong": oracle.wrong[:20],
        "rss_mib_at_most": round(most / 2**20, 1),
        **more,
        "tracebacks": (directory / "log").read_text().count("Traceback"),
        "seconds": round(time.monotonic() - began),
    }


def _remaining(world: WorldOfProcesses, daemon: DaemonProcess) -> dict[str, object]:
    """Return the descriptors that remain open after all programs have ended, besides the initial ones."""
    world.end_all()
    for number in range(LEAVING_TICKS):
        world.elapsed += TICK_SECONDS
        daemon.start_tick(_tick_input(world, f"over {number}"))
        list(daemon.notifications())
    return {f"{kind}_more": daemon.needs[kind] - daemon.opened[kind] for kind in ("descriptors", "threads")}


def _tick_input(world: WorldOfProcesses, mark: str) -> TickInput:
    agents = world.send_reports(mark)
    return TickInput(
        *(world.elapsed, world.wall, world.state, world.reading(), agents, mark, world.disk_full, world.receiver_down)
    )


def _attack(path: Path, rng: random.Random) -> int:
    """Open one connection that ends with a message that may be wrong, and return the number of its messages."""
    data, frames, _ = messages_of_connection(rng)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(20)
        connection.connect(str(path))
        try:
            connection.sendall(data)
        except ConnectionError:
            pass  # the daemon has already closed it
    return frames
