"""Daemon on the simulated device, and raw connections to its port."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from pathlib import Path

from tests.helpers.running import RunningDaemon, until

SIM = ("--source", "sim")


class TlsDaemon(RunningDaemon):
    """Daemon that answers over TLS. It is healthy as soon as its port is open."""

    def healthy(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", int(self.url.rpartition(":")[2]))) == 0


def start_daemon(
    directory: Path,
    *options: str,
    around: tuple[str, ...] = (),
    kind: type[RunningDaemon] = RunningDaemon,
    environ: Mapping[str, str] | None = None,
) -> RunningDaemon:
    cards = directory / "cards"
    cards.mkdir(parents=True)
    variables = {"GPUMOND_SIM_DIR": str(cards), **(environ or {})}
    daemon = kind(directory / "daemon", *SIM, *options, environ=variables, around=around)
    if kind is RunningDaemon:
        try:
            until(lambda: daemon.value("gpumond_store_writable"))  # before, a change is refused with 503
        except BaseException:
            daemon.stop()
            raise
    return daemon


def connect(daemon: RunningDaemon, source: str = "127.0.0.1") -> socket.socket:
    port = int(daemon.url.rpartition(":")[2])
    connection = socket.create_connection(("127.0.0.1", port), timeout=20, source_address=(source, 0))
    connection.settimeout(20)
    return connection


def exchange(daemon: RunningDaemon, raw: bytes) -> bytes:
    """Send raw bytes and return the answer until the daemon closes the connection or is silent for half a
    second after it has answered on another connection: on a loaded machine, any answer may take a second.
    """
    with connect(daemon) as connection:
        connection.sendall(raw)
        connection.settimeout(0.5)
        received, silent = b"", False
        while True:
            try:
                chunk = connection.recv(65536)
            except ConnectionError:
                return received
            except TimeoutError:
                if silent:
                    return received
                silent = daemon.healthy()
                continue
            if not chunk:
                return received
            received, silent = received + chunk, False


def statuses(received: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3})", received)]


def rejected(daemon: RunningDaemon, reason: str) -> float:
    return daemon.value("gpumond_http_rejected_total", reason=reason) or 0.0
