"""One connection of the agents' socket: its limits, its reports, and the checks of its messages."""

from __future__ import annotations

import asyncio
import re
import socket
from dataclasses import dataclass, replace
from hashlib import blake2b

from gpumond.errors import ProtocolError
from gpumond.host.peer_credentials import Identity
from gpumond.model.claims import MAX_REPORTED_POOLS, bounded
from gpumond.model.program import SCOPES
from gpumond.model.snapshot import AgentReport
from gpumond.protocol.messages import AgentResponse, FlushResult, Hello, Report, clean
from gpumond.protocol.validator import decode

WORKLOAD = re.compile(r"[A-Za-z0-9._/-]{0,64}")
SCOPE = re.compile(r"[A-Za-z0-9._/-]{1,128}")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the socket, some by uid; a uid beyond its budget is read more slowly, without cost to others."""

    peers: int = 8000
    peers_per_uid: int = 128
    pending: int = 512
    """Connections without a hello; beyond this number none is accepted for a moment."""
    pending_per_uid: int = 16
    """Connections of a uid beyond this number are accepted and closed at once, so that they do not fill the queue."""
    hello_seconds: float = 2.0
    shared_hello_seconds: float = 0.5
    """The same for a uid that has other connections without a hello."""
    frame_seconds: float = 5.0
    idle_seconds: float = 60.0
    answer_seconds: float = 0.5
    """Longer than a flush may take, so that an agent can report why it failed."""
    stale_seconds: float = 15.0
    """Age in seconds at which a report is no longer used."""
    frames_per_second: int = 512
    bytes_per_second: int = 2 << 20
    reserved_descriptors: int = 64


class Budget:
    """Token bucket of messages and bytes for one uid."""

    def __init__(self, limits: Limits, now: float) -> None:
        self._limits, self._filled_at = limits, now
        self.messages, self.bytes = float(limits.frames_per_second), float(limits.bytes_per_second)

    def wait(self, now: float) -> float:
        """Return the seconds until this uid may be read again; 0 if at once."""
        limits, passed = self._limits, now - self._filled_at
        self._filled_at = now
        self.messages = min(limits.frames_per_second, self.messages + passed * limits.frames_per_second)
        self.bytes = min(limits.bytes_per_second, self.bytes + passed * limits.bytes_per_second)
        return max(0.0, -self.messages / limits.frames_per_second, -self.bytes / limits.bytes_per_second)


class AgentConnection:
    """One connection, its hello and its newest report."""

    def __init__(
        self, connection: socket.socket, identity: Identity, pidfd: int | None, budget: Budget, now: float
    ) -> None:
        self.socket, self.identity, self.pidfd, self.budget = connection, identity, pidfd, budget
        self.buffer = b""
        self.hello: Hello | None = None
        self.report: Report | None = None
        self.unread = self._read = b""
        """Message of a report that has not been decoded, and digest of the message of ``report``."""
        self.received_at = self.partial_since = now
        self.answers: dict[str, asyncio.Future[FlushResult]] = {}
        self.unanswered: set[str] = set()
        """Flushes that timed out; an agent answers each of them later."""
        self.requests: dict[str, asyncio.Future[AgentResponse]] = {}

    def newest(self) -> Report | None:
        """Return its newest report, decoded lazily: only the last report before a tick is used.

        Raises ProtocolError.
        """
        if self.unread:
            encoded, self.unread = self.unread, b""
            digest = blake2b(encoded, digest_size=16).digest()
            if digest == self._read:
                return self.report
            report = decode(encoded)
            if not isinstance(report, Report):
                raise ProtocolError("type", "malformed report")
            self.set_report(report, digest)
        return self.report

    def set_report(self, report: Report, digest: bytes = b"") -> None:
        """Set the newest report, with at most ``MAX_REPORTED_POOLS`` pools and their sums. Raises ProtocolError."""
        check_report(report)
        if len(report.pools) > MAX_REPORTED_POOLS:
            report = replace(report, pools=bounded(report.pools, most=MAX_REPORTED_POOLS))
        self.report, self.unread, self._read = report, b"", digest

    def left(self) -> None:
        """Cancel all waits for an answer of this agent."""
        for answer in self.answers.values():
            if not answer.done():
                answer.set_exception(ConnectionResetError("the agent left"))
        for request in self.requests.values():
            if not request.done():
                request.set_exception(ConnectionResetError("the agent left"))


def check_hello(hello: Hello) -> None:
    """Check the workload's name. Raises ProtocolError."""
    if not WORKLOAD.fullmatch(hello.workload):
        raise ProtocolError("value", f"hello.workload: {hello.workload!r:.80} is not [A-Za-z0-9._/-]{{0,64}}")


def check_report(report: Report) -> None:
    """Check number and length of names that become labels. Raises ProtocolError."""
    names = [scope.name for scope in report.program.scopes]
    wrong = next((name for name in names if not SCOPE.fullmatch(name)), None)
    if wrong is not None:
        raise ProtocolError("value", f"report.program.scopes: {clean(wrong)!r:.80} is not [A-Za-z0-9._/-]{{1,128}}")
    if len(names) > SCOPES + 1:
        raise ProtocolError("value", f"report.program.scopes: {len(names)}, more than {SCOPES + 1}")


def agent_report(identity: Identity, hello: Hello, report: Report, age: float) -> AgentReport:
    return AgentReport(
        pid=identity.pid,
        start_ticks=identity.start_ticks,
        uid=identity.uid,
        workload=hello.workload,
        age_seconds=age,
        frameworks=report.frameworks,
        flush_policy=report.flush_policy,
        pools=report.pools,
        program=report.program,
        host_pools=report.host_pools,
    )
