"""Real daemon that receives fuzzed messages of many users, while one valid agent reports."""

from __future__ import annotations

import os
import re
import socket
import time
from collections import Counter
from pathlib import Path

from bench.result import spread
from bench.scrape import children, rss
from gpumond.facts.messages import Goodbye, Hello, Report, encode
from tests.helpers.running import RunningDaemon, until
from tests.helpers.values import make_pool
from tests.soak.attackers import Attackers

USERS = 8
REPORTS_A_SECOND = 10
WARM_UP = 20_000
"""Messages after which every path of the daemon has been used once."""
REASONS = ("json", "version", "type", "value", "missing", "hello", "oversize")
"""Reasons for which a message is rejected."""


class ValidAgent:
    """Agent that counts its reports in its pool's live bytes."""

    def __init__(self, path: Path) -> None:
        self.sent = 0
        self._due = time.monotonic()
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(str(path))
        self._connection.settimeout(30)
        self._connection.sendall(encode(Hello("valid")))

    def report(self) -> None:
        """Send the next report. Raises OSError if the daemon has closed the connection."""
        self.sent += 1
        self._connection.sendall(encode(Report(pools=(make_pool("GPU-valid", live=self.sent),))))
        self._due += 1 / REPORTS_A_SECOND
        time.sleep(max(0.0, self._due - time.monotonic()))

    def close(self) -> None:
        self._connection.close()

    def arrived(self, daemon: RunningDaemon) -> bool:
        """Return whether the daemon shows the last report; messages of one connection are read in order."""
        own = [each for each in daemon.get("snapshot")["reports"] if each["pid"] == os.getpid()]
        return any(pool["live_bytes"] == self.sent for each in own for pool in each["pools"])


def processing_seconds(path: Path) -> float:
    """Return the seconds from a connection's first byte until its report was processed: the bye after it closes the
    connection.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.settimeout(30)
        began = time.perf_counter()
        connection.sendall(encode(Hello("probe")) + encode(Report()) + encode(Goodbye()))
        assert connection.recv(1) == b""
        return time.perf_counter() - began


def send_fuzzed_messages(directory: Path, frames: int) -> dict[str, object]:
    """Send fuzzed messages. Raises AssertionError if the daemon ends, loses a report of the valid agent, or rejects a
    valid message.
    """
    directory.chmod(0o755)
    cards = directory / "cards"
    cards.mkdir()
    daemon = RunningDaemon(
        directory / "daemon",
        *("--source", "sim", "--interval", "0.2s"),
        environ={"GPUMOND_SIM_DIR": str(cards), "GPUMOND_SOCKET_MODE": "666"},
    )
    agent = ValidAgent(daemon.socket)
    try:
        attack = FuzzedMessages(daemon, agent)
        attack.send(WARM_UP, seed=0)
        warm = attack.memory()
        attack.send(max(0, frames - WARM_UP), seed=1)
        assert daemon.process.poll() is None
        return attack.figures(warm)
    finally:
        agent.close()
        daemon.stop()


class FuzzedMessages:
    def __init__(self, daemon: RunningDaemon, agent: ValidAgent) -> None:
        self._daemon, self._agent = daemon, agent
        self._began = time.monotonic()
        self._family = [daemon.process.pid, *children(daemon.process.pid)]
        self._counts = Counter[str]()
        self._checks, self._most = 0, 0
        self._seconds: list[float] = []

    def send(self, frames: int, seed: int) -> None:
        """Send fuzzed messages. The valid agent is checked every two seconds, and at the end."""
        attackers = Attackers(self._daemon.socket, frames, USERS, seed)
        try:
            while attackers.busy():
                self._agent.report()
                self._seconds.append(processing_seconds(self._daemon.socket))
                if self._agent.sent % (2 * REPORTS_A_SECOND) == 0:
                    self._check_agent()
            self._counts += attackers.totals()
        finally:
            attackers.stop()
        self._agent.report()
        self._check_agent()

    def _check_agent(self) -> None:
        until(lambda: self._agent.arrived(self._daemon))
        self._checks += 1
        self._most = max(self._most, self.memory())

    def memory(self) -> int:
        return sum(map(rss, self._family))

    def figures(self, warm: int) -> dict[str, object]:
        refused = rejects(self._daemon)
        rejected_messages = sum(refused[reason] for reason in REASONS)
        assert rejected_messages == self._counts["wrong"], (
            f"{rejected_messages} refused, {self._counts['wrong']} were wrong"
        )
        log = self._daemon.log.read_text()
        return {
            "frames": self._counts["frames"],
            "connections": self._counts["connections"],
            "wrong": self._counts["wrong"],
            "refused": {reason: count for reason, count in refused.items() if count},
            "users": USERS,
            "seconds": round(time.monotonic() - self._began, 1),
            "reports_of_the_honest_agent": self._agent.sent,
            "looked_for_and_found": self._checks,
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
    found = re.findall(r'^gpumond_agent_connections_rejected_total\{reason="(\w+)"\} (\S+)$', page, re.MULTILINE)
    return dict.fromkeys(REASONS, 0) | {reason: int(float(count)) for reason, count in found}
