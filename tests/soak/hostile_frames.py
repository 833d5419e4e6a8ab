"""A real daemon that hears fuzzed frames from many users, while one honest agent reports all along."""

from __future__ import annotations

import os
import re
import socket
import time
from collections import Counter
from pathlib import Path

from bench.result import spread
from bench.scrape import children, rss
from gpumond.protocol.messages import Bye, Hello, Report, encode
from gpumond.testing import make_pool
from tests.running import RunningDaemon, until
from tests.soak.attackers import Vandals

USERS = 8
REPORTS_A_SECOND = 10
WARM_UP = 20_000
"""Frames after which the daemon has seen everything once."""
OF_FRAMES = ("json", "version", "type", "value", "missing", "hello", "oversize")
"""Reasons for which a frame is refused."""


class Honest:
    """An agent that counts in its pool's live bytes, so that what has arrived can be told."""

    def __init__(self, path: Path) -> None:
        self.sent = 0
        self._due = time.monotonic()
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(str(path))
        self._connection.settimeout(30)
        self._connection.sendall(encode(Hello("honest")))

    def report(self) -> None:
        """Raises OSError if the daemon has closed the connection."""
        self.sent += 1
        self._connection.sendall(encode(Report(pools=(make_pool("GPU-honest", live=self.sent),))))
        self._due += 1 / REPORTS_A_SECOND
        time.sleep(max(0.0, self._due - time.monotonic()))

    def close(self) -> None:
        self._connection.close()

    def arrived(self, daemon: RunningDaemon) -> bool:
        """Return whether the daemon shows the last report; messages of one connection are read in order."""
        own = [each for each in daemon.get("snapshot")["reports"] if each["pid"] == os.getpid()]
        return any(pool["live_bytes"] == self.sent for each in own for pool in each["pools"])


def taken_up(path: Path) -> float:
    """Seconds from a connection's first byte until its report was taken up: the goodbye behind it is obeyed."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.settimeout(30)
        began = time.perf_counter()
        connection.sendall(encode(Hello("probe")) + encode(Report()) + encode(Bye()))
        assert connection.recv(1) == b""
        return time.perf_counter() - began


def siege(directory: Path, frames: int) -> dict[str, object]:
    """Raises AssertionError if the daemon dies, loses a report of the honest agent or refuses what it should not."""
    directory.chmod(0o755)
    cards = directory / "cards"
    cards.mkdir()
    daemon = RunningDaemon(
        directory / "daemon",
        *("--source", "sim", "--interval", "0.2"),
        environ={"GPUMOND_SIM_DIR": str(cards), "GPUMOND_SOCKET_MODE": "666"},
    )
    honest = Honest(daemon.socket)
    try:
        besieged = Siege(daemon, honest)
        besieged.wave(WARM_UP, seed=0)
        warm = besieged.memory()
        besieged.wave(max(0, frames - WARM_UP), seed=1)
        assert daemon.process.poll() is None
        return besieged.figures(warm)
    finally:
        honest.close()
        daemon.stop()


class Siege:
    def __init__(self, daemon: RunningDaemon, honest: Honest) -> None:
        self._daemon, self._honest = daemon, honest
        self._began = time.monotonic()
        self._family = [daemon.process.pid, *children(daemon.process.pid)]
        self._told = Counter[str]()
        self._looks, self._most = 0, 0
        self._seconds: list[float] = []

    def wave(self, frames: int, seed: int) -> None:
        """Send fuzzed messages. The valid agent is checked every two seconds, and at the end."""
        vandals = Vandals(self._daemon.socket, frames, USERS, seed)
        try:
            while vandals.busy():
                self._honest.report()
                self._seconds.append(taken_up(self._daemon.socket))
                if self._honest.sent % (2 * REPORTS_A_SECOND) == 0:
                    self._look()
            self._told += vandals.told()
        finally:
            vandals.stop()
        self._honest.report()
        self._look()

    def _look(self) -> None:
        until(lambda: self._honest.arrived(self._daemon))
        self._looks += 1
        self._most = max(self._most, self.memory())

    def memory(self) -> int:
        return sum(map(rss, self._family))

    def figures(self, warm: int) -> dict[str, object]:
        refused = rejects(self._daemon)
        of_frames = sum(refused[reason] for reason in OF_FRAMES)
        assert of_frames == self._told["wrong"], f"{of_frames} refused, {self._told['wrong']} were wrong"
        log = self._daemon.log.read_text()
        return {
            "frames": self._told["frames"],
            "connections": self._told["connections"],
            "wrong": self._told["wrong"],
            "refused": {reason: count for reason, count in refused.items() if count},
            "users": USERS,
            "seconds": round(time.monotonic() - self._began, 1),
            "reports_of_the_honest_agent": self._honest.sent,
            "looked_for_and_found": self._looks,
            "reports_taken_up_meanwhile": spread(self._seconds),
            "rss_mib_after_warm_up": round(warm / 2**20, 1),
            "rss_mib_at_most": round(self._most / 2**20, 1),
            "rss_growth_mib": round((self.memory() - warm) / 2**20, 2),
            "tracebacks": log.count("Traceback"),
            "log_lines": len(log.splitlines()),
        }


def rejects(daemon: RunningDaemon) -> dict[str, int]:
    """Return the number of rejected messages by reason."""
    page = daemon.request("/metrics")[1].decode()
    found = re.findall(r'^gpumond_agent_rejects_total\{reason="(\w+)"\} (\S+)$', page, re.MULTILINE)
    return dict.fromkeys(OF_FRAMES, 0) | {reason: int(float(count)) for reason, count in found}
