"""One peer of the agents' socket: how much it may say, what it has said, and what it may not say."""

from __future__ import annotations

import asyncio
import re
import socket
from dataclasses import dataclass
from hashlib import blake2b

from gpumond.errors import ProtocolError
from gpumond.host.peer_credentials import Identity
from gpumond.model.program import SCOPES
from gpumond.model.snapshot import AgentReport
from gpumond.protocol.messages import AgentResponse, FlushResult, Hello, Report, clean
from gpumond.protocol.validator import decode

WORKLOAD = re.compile(r"[A-Za-z0-9._/-]{0,64}")
SCOPE = re.compile(r"[A-Za-z0-9._/-]{1,128}")


@dataclass(frozen=True, slots=True)
class Limits:
    """Per uid where it says so; a uid beyond its budget is read more slowly, never at another's cost."""

    peers: int = 8000
    peers_per_uid: int = 128
    pending: int = 512
    """Connections that have not said hello: beyond it no more are accepted for a moment."""
    pending_per_uid: int = 16
    """Those beyond it are accepted and closed at once, so that they do not fill the queue."""
    hello_seconds: float = 2.0
    shared_hello_seconds: float = 0.5
    """The same for a uid that has other connections without a hello."""
    frame_seconds: float = 5.0
    idle_seconds: float = 60.0
    answer_seconds: float = 0.5
    """Longer than a flush may take, so that an agent can say why it did not."""
    stale_seconds: float = 15.0
    """An older report no longer counts as knowledge."""
    frames_per_second: int = 512
    bytes_per_second: int = 2 << 20
    reserved_descriptors: int = 64


class Budget:
    """A token bucket of frames and bytes for one uid."""

    def __init__(self, limits: Limits, now: float) -> None:
        self._limits, self._filled_at = limits, now
        self.frames, self.bytes = float(limits.frames_per_second), float(limits.bytes_per_second)

    def wait(self, now: float) -> float:
        """Seconds until this uid may be read again; 0 if at once."""
        limits, passed = self._limits, now - self._filled_at
        self._filled_at = now
        self.frames = min(limits.frames_per_second, self.frames + passed * limits.frames_per_second)
        self.bytes = min(limits.bytes_per_second, self.bytes + passed * limits.bytes_per_second)
        return max(0.0, -self.frames / limits.frames_per_second, -self.bytes / limits.bytes_per_second)


class AgentConnection:
    """One connection and what it has said."""

    def __init__(
        self, connection: socket.socket, identity: Identity, pidfd: int | None, budget: Budget, now: float
    ) -> None:
        self.socket, self.identity, self.pidfd, self.budget = connection, identity, pidfd, budget
        self.buffer = b""
        self.hello: Hello | None = None
        self.report: Report | None = None
        self.unread = self._read = b""
        """The message of a report that came after it, and the digest of its own."""
        self.heard_at = self.partial_since = now
        self.answers: dict[str, asyncio.Future[FlushResult]] = {}
        self.unanswered: set[str] = set()
        """Flushes that were waited for no longer; an agent answers each, sooner or later."""
        self.asked: dict[str, asyncio.Future[AgentResponse]] = {}

    def newest(self) -> Report | None:
        """Its newest report, decoded when somebody asks: of those between two ticks all but one are for nobody.

        Raises ProtocolError.
        """
        if self.unread:
            frame, self.unread = self.unread, b""
            digest = blake2b(frame, digest_size=16).digest()
            if digest == self._read:
                return self.report
            message = decode(frame)
            if not isinstance(message, Report):
                raise ProtocolError("type", "a report that is none")
            self.hear(message, digest)
        return self.report

    def hear(self, report: Report, digest: bytes = b"") -> None:
        """``report`` is the newest from now on. Raises ProtocolError."""
        check_report(report)
        self.report, self.unread, self._read = report, b"", digest

    def left(self) -> None:
        """Whoever waits for an answer waits no longer."""
        for answer in self.answers.values():
            if not answer.done():
                answer.set_exception(ConnectionResetError("the agent left"))
        for asked in self.asked.values():
            if not asked.done():
                asked.set_exception(ConnectionResetError("the agent left"))


def check_hello(hello: Hello) -> None:
    """Raises ProtocolError."""
    if not WORKLOAD.fullmatch(hello.workload):
        raise ProtocolError("value", f"hello.workload: {hello.workload!r:.80} is not [A-Za-z0-9._/-]{{0,64}}")


def check_report(report: Report) -> None:
    """What becomes a label is bounded, in characters and in number. Raises ProtocolError."""
    names = [scope.name for scope in report.program.scopes]
    wrong = next((name for name in names if not SCOPE.fullmatch(name)), None)
    if wrong is not None:
        raise ProtocolError("value", f"report.program.scopes: {clean(wrong)!r:.80} is not [A-Za-z0-9._/-]{{1,128}}")
    if len(names) > SCOPES + 1:
        raise ProtocolError("value", f"report.program.scopes: {len(names)}, more than {SCOPES + 1}")


def agent_report(identity: Identity, hello: Hello, report: Report, age: float) -> AgentReport:
    return AgentReport(
        identity.pid,
        identity.start_ticks,
        identity.uid,
        hello.workload,
        age,
        report.frameworks,
        report.flush_policy,
        report.pools,
        report.program,
        report.host_pools,
    )
