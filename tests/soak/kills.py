"""Simulated days with real sockets, hostile frames and kills: `World` and `Oracle` are here, the daemon is `life`.

Each program of the world is a process, each agent a connection; a kill -9 comes in the middle of a tick, and the next
life resumes from the store. The oracle sees what the receiver is told.
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

from gpumond.host.peer_credentials import start_ticks
from gpumond.model.persisted import Labels
from gpumond.model.snapshot import Reading
from gpumond.protocol.messages import Hello, Report, encode, to_json
from gpumond.store import rows, verify_audit
from tests.simulator.program import Process
from tests.soak.attackers import volley
from tests.soak.incidents import Oracle, troubles
from tests.soak.life import Moment
from tests.soak.week import DAY
from tests.soak.world import TICK_SECONDS, World

KILL_RATIO = 1 / 250
"""Interval of ticks."""
KILL_WITHIN_SECONDS = 0.03
HOSTILE_RATIO = 0.3
LEAVING_TURNS = 10
SLACK_SECONDS = 900.0
"""Additional delay that kills and a failing receiver may cause."""
ONE_LIFE = ("xid-errors", "out-of-memory", "leak")
"""Nobody is killed meanwhile: of an event that no daemon saw none hears later, and a leak as slow as this one takes
longer to be found again than its alert is held after a restart."""


class Programs:
    """Processes of the world's programs, by pid."""

    def __init__(self, path: Path) -> None:
        self._asking, its = socket.socketpair()
        command = [sys.executable, "-S", "-m", "tests.soak.relay", str(path)]
        self._maker = subprocess.Popen(command, stdin=its)
        its.close()
        self._controls: dict[int, socket.socket] = {}

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Pid and start of a new one, for ever."""
        while True:
            own, its = socket.socketpair()
            socket.send_fds(self._asking, [b"p"], [its.fileno()])
            its.close()
            pid = int(self._asking.recv(64))
            start = start_ticks(pid)
            assert start is not None
            self._controls[pid] = own
            yield pid, start

    def say(self, pid: int, frame: bytes) -> None:
        self._controls[pid].sendall(frame)

    def end(self, pid: int) -> None:
        self._controls.pop(pid).close()

    def close(self) -> None:
        for pid in list(self._controls):
            self.end(pid)
        self._asking.close()
        self._maker.wait(10)


class WorldOfProcesses(World):
    """A world whose programs are processes."""

    def __init__(self, seed: int, programs: Programs) -> None:
        self._programs, self._introduced = programs, set[int]()
        self._heard = Counter[str]()
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
        """Return a reading with the XID errors since the driver was opened."""
        reading = super().reading()
        if reading is None:
            return None
        xids = (replace(each, count=each.count - self._heard[each.device_uuid]) for each in reading.xids)
        return replace(reading, xids=tuple(each for each in xids if each.count))

    def reopen(self) -> None:
        """Another daemon opens the driver."""
        self._heard = Counter(self.xids)

    def end_all(self) -> None:
        for process in list(self._running.values()):
            self.end(process)

    def speak(self, mark: str) -> int:
        """Every agent says what it has to say; how many they are."""
        reports = self.reports()
        for report in reports:
            if report.pid not in self._introduced:
                self._introduced.add(report.pid)
                self._programs.say(report.pid, encode(Hello(report.workload)))
            self._programs.say(report.pid, encode(Report(pools=report.pools, frameworks=(mark,))))
        return len(reports)


class Life:
    """One process. ``opened`` is what it had open and needed in the beginning, ``needs`` what it does now."""

    def __init__(self, directory: Path, path: Path, world: World) -> None:
        command = [sys.executable, "-m", "tests.soak.life", str(directory), str(path), str(world.elapsed)]
        command += ["full"] if world.disk_full else []
        with (directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, bufsize=1
            )
        assert self._process.stdin
        assert self._process.stdout
        self._said, self._heard = self._process.stdin, self._process.stdout
        self.opened = self.needs = self._line()

    def tell(self, moment: Moment) -> None:
        self._said.write(to_json(moment).decode() + "\n")

    def news(self) -> Iterator[dict[str, Any]]:
        """Return the notifications until the end of the tick."""
        while "descriptors" not in (line := self._line()):
            yield line
        self.needs = line

    def kill(self) -> list[dict[str, Any]]:
        """Return the notifications until a time."""
        self._process.kill()
        with self._process:
            return [json.loads(line) for line in self._heard if line.endswith("\n") and "raised" in line]

    def abandon(self) -> None:
        if self._process.poll() is None:
            self.kill()

    def end(self) -> None:
        self._said.close()
        with self._process:
            self._heard.read()
        assert self._process.returncode == 0

    def _line(self) -> dict[str, Any]:
        line = self._heard.readline()
        assert line, "the daemon has died; see its log"
        told: dict[str, Any] = json.loads(line)
        return told


class Listening:
    """The receiver: what fires as it knows, and what it was told once more than needed."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle, self._firing = oracle, set[Labels]()
        self.told = Counter[str]()

    def hear(self, now: float, news: list[dict[str, Any]]) -> None:
        for message in news or [{"raised": [], "resolved": []}]:
            raised, resolved = ([rows.alert(text) for text in message[kind]] for kind in ("raised", "resolved"))
            new = [alert for alert in raised if alert.labels not in self._firing]
            self._firing |= {alert.labels for alert in new}
            over = [alert for alert in resolved if alert.labels in self._firing]
            self._firing -= {alert.labels for alert in over}
            self.told.update(raised=len(new), resolved=len(over))
            self.told.update(raised_again=len(raised) - len(new), resolved_again=len(resolved) - len(over))
            self._oracle.see(now, new, over)


def survive(directory: Path, days: float, seed: int = 1) -> dict[str, object]:
    """Figures of so many days. Raises AssertionError if a life ends by itself or its audit is broken."""
    path = directory / "agent.sock"
    programs = Programs(path)
    try:
        return _survive(directory, path, programs, days, seed)
    finally:
        programs.close()


def _survive(directory: Path, path: Path, programs: Programs, days: float, seed: int) -> dict[str, object]:
    world, oracle, dice = WorldOfProcesses(seed, programs), Oracle(slack=SLACK_SECONDS), random.Random(seed)
    receiver, counts = Listening(oracle), Counter[str]()
    trouble, began = troubles(world, oracle), time.monotonic()
    life, most = Life(directory, path, world), 0
    try:
        for number in range(int(days * DAY / TICK_SECONDS)):
            world.turn()
            oracle.now = world.elapsed
            next(trouble)
            if dice.random() < HOSTILE_RATIO:
                counts.update(hostile_frames=_attack(path, dice))
            life.tell(_moment(world, f"tick {number}"))
            if dice.random() < KILL_RATIO and not oracle.awaits(*ONE_LIFE):
                time.sleep(dice.uniform(0, KILL_WITHIN_SECONDS))
                news = life.kill()
                counts.update(kills=1)
                problems = verify_audit(directory / "gpumond.db")
                assert problems == [], problems
                world.reopen()
                life = Life(directory, path, world)
            else:
                news = list(life.news())
                most = max(most, life.needs["rss"])
            receiver.hear(world.elapsed, news)
        more = _left_behind(world, life)
        life.end()
    finally:
        life.abandon()
    return {
        "simulated_days": days,
        "ticks": int(days * DAY / TICK_SECONDS),
        "programs": world.programs,
        **counts,
        "alerts_expected": oracle.expected,
        "alerts_not_due_at_the_end": oracle.awaited,
        **{f"told_{kind}": count for kind, count in receiver.told.items()},
        "wrong": oracle.wrong[:20],
        "rss_mib_at_most": round(most / 2**20, 1),
        **more,
        "tracebacks": (directory / "log").read_text().count("Traceback"),
        "seconds": round(time.monotonic() - began),
    }


def _left_behind(world: WorldOfProcesses, life: Life) -> dict[str, object]:
    """Return the descriptors that remain open after all programs have ended, besides the initial ones."""
    world.end_all()
    for number in range(LEAVING_TURNS):
        world.elapsed += TICK_SECONDS
        life.tell(_moment(world, f"over {number}"))
        list(life.news())
    return {f"{kind}_more": life.needs[kind] - life.opened[kind] for kind in ("descriptors", "threads")}


def _moment(world: WorldOfProcesses, mark: str) -> Moment:
    agents = world.speak(mark)
    return Moment(
        *(world.elapsed, world.wall, world.state, world.reading(), agents, mark, world.disk_full, world.receiver_down)
    )


def _attack(path: Path, dice: random.Random) -> int:
    """One connection that ends with a frame that may be wrong; how many frames it had."""
    said, frames, _ = volley(dice)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(20)
        connection.connect(str(path))
        try:
            connection.sendall(said)
        except ConnectionError:
            pass  # the daemon was quicker
    return frames
