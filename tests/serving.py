"""A daemon on the simulated device, and its port as strangers use it: raw bytes."""

from __future__ import annotations

import re
import socket
from pathlib import Path

from tests.running import RunningDaemon

SIM = ("--source", "sim")


def a_daemon(directory: Path, *options: str, around: tuple[str, ...] = (), kind: type[RunningDaemon] = RunningDaemon):
    cards = directory / "cards"
    cards.mkdir(parents=True)
    return kind(directory / "daemon", *SIM, *options, environ={"GPUMOND_SIM_DIR": str(cards)}, around=around)


def connect(daemon: RunningDaemon, source: str = "127.0.0.1") -> socket.socket:
    port = int(daemon.url.rpartition(":")[2])
    connection = socket.create_connection(("127.0.0.1", port), timeout=20, source_address=(source, 0))
    connection.settimeout(20)
    return connection


def say(daemon: RunningDaemon, raw: bytes) -> bytes:
    """All that is answered until the daemon closes, or says nothing more for a moment."""
    with connect(daemon) as connection:
        connection.sendall(raw)
        connection.settimeout(1.0)
        heard = b""
        try:
            while chunk := connection.recv(65536):
                heard += chunk
        except (TimeoutError, ConnectionError):
            pass
        return heard


def statuses(heard: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3})", heard)]


def rejected(daemon: RunningDaemon, reason: str) -> float:
    return daemon.value("gpumond_http_rejects_total", reason=reason) or 0.0
