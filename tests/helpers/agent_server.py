"""Agent server on a socket in a temporary directory, and what its tests send and wait for."""

from __future__ import annotations

import asyncio
import functools
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path

from gpumond.facts.messages import Hello, Report, encode
from gpumond.facts.snapshot import AgentReport
from gpumond.host.machine import read_start_ticks
from gpumond.host.peer import PeerIdentity
from gpumond.host.runtime_directory import bind_agent_socket
from gpumond.programs.agent_connection import SocketLimits
from gpumond.programs.agent_server import AgentServer
from tests.helpers.values import make_pool

HELLO = encode(Hello("train"))
REPORT = encode(Report(pools=(make_pool(live=7),)))
MALFORMED_REPORT = b'{"v":1,"type":"report","pools":[{}]}\n'
OWN = PeerIdentity(os.getpid(), read_start_ticks(os.getpid()) or 0, os.getuid())


class ServerOnSocket:
    """Agent server on a socket, with the counts of reports and of rejected connections by reason."""

    def __init__(self, path: Path, limits: SocketLimits) -> None:
        self.path = path
        self.rejected: Counter[str] = Counter()
        listener = bind_agent_socket(path, 0o600)
        self.reported = 0
        self.server = AgentServer(
            listener, limits=limits, on_reports=self.count, on_rejection=lambda reason: self.rejected.update([reason])
        )

    def count(self, reports: int) -> None:
        self.reported += reports

    def connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(self.path))
        return connection

    async def reports(self, count: int = 1) -> tuple[AgentReport, ...]:
        """Wait until the server has ``count`` reports and return them."""
        await eventually(lambda: len(self.server.reports()) == count)
        return self.server.reports()

    def has_report(self, live: int) -> bool:
        """Return whether a report contains a pool with ``live`` live bytes."""
        return any(pool.live_bytes == live for report in self.server.reports() for pool in report.pools)


async def eventually(condition: Callable[[], object]) -> None:
    """Wait until the condition is true, at most ten seconds."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition did not become true in time")


@asynccontextmanager
async def serving(directory: Path, limits: SocketLimits = SocketLimits()) -> AsyncIterator[ServerOnSocket]:
    harness = ServerOnSocket(directory / "agent.sock", limits)
    harness.server.serve()
    try:
        yield harness
    finally:
        harness.server.close()


def in_event_loop(test: Callable[..., Coroutine[None, None, None]]) -> Callable[..., None]:
    """Decorator that runs a coroutine test in an event loop of its own."""

    @functools.wraps(test)
    def run(*args: object, **options: object) -> None:
        asyncio.run(test(*args, **options))

    return run


async def closed(connection: socket.socket) -> None:
    """Wait until the other end has closed the connection."""
    connection.setblocking(False)

    def at_end() -> bool:
        try:
            return connection.recv(4096) == b""
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True

    await eventually(at_end)
