"""One connection of the agents' socket: its messages, its reports, and their checks."""

from __future__ import annotations

import asyncio
import re
import socket
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from gpumond.facts.errors import ProtocolError
from gpumond.facts.messages import (
    MAX_MESSAGE_BYTES,
    MAX_WORKLOAD_LENGTH,
    AgentResponse,
    FlushResult,
    Hello,
    Message,
    Report,
    decode,
    encode,
    printable_text,
)
from gpumond.facts.program import MAX_RANKS, MAX_SCOPES, PoolLimit
from gpumond.facts.snapshot import AgentReport
from gpumond.host.peer import PeerIdentity
from gpumond.tick.claims import MAX_REPORTED_POOLS, limit_pools

MAX_COMPONENTS = 8
NAME_PATTERN = re.compile(r"[A-Za-z0-9._/-]{1,128}")
NOT_A_NAME = "isn't a name of at most 128 characters of A-Za-z0-9._/-"
ResponseT = TypeVar("ResponseT")


class AgentConnection:
    """One connection, its hello and its newest report. ``user``: the uid for which the connection counts."""

    def __init__(
        self,
        connection: socket.socket,
        identity: PeerIdentity,
        pidfd: int | None,
        user: int,
        budget: ReadBudget,
        now: float,
    ) -> None:
        self.socket, self.identity, self.pidfd, self.user, self.budget = connection, identity, pidfd, user, budget
        self.partial_message = b""
        """Beginning of a message whose end has not arrived."""
        self.hello: Hello | None = None
        self.report: Report | None = None
        self.undecoded_report = b""
        """Message of a report that has not been decoded."""
        self._report_hash: int | None = None
        """Hash of the message of ``report``; None if that was decoded at once."""
        self.received_at = self.partial_since = now
        self.resumed_at = float("-inf")
        """End of the last suspension of the process, after which the agent may be silent for a moment."""
        self.flush_answers: dict[str, asyncio.Future[FlushResult]] = {}
        self.unanswered_flushes: set[str] = set()
        """Flushes that timed out; an agent answers each of them later."""
        self.request_answers: dict[str, asyncio.Future[AgentResponse]] = {}

    def newest_report(self) -> Report | None:
        """Return the agent's newest report, decoded lazily: only the last report before a tick is used.

        Raises ProtocolError.
        """
        if self.undecoded_report:
            encoded, self.undecoded_report = self.undecoded_report, b""
            if hash(encoded) == self._report_hash:
                return self.report
            report = decode(encoded)
            if not isinstance(report, Report):
                raise ProtocolError("type", "malformed report")
            self.set_report(report, hash(encoded))
        return self.report

    def set_report(self, report: Report, report_hash: int | None = None) -> None:
        """Set the newest report, with at most ``MAX_REPORTED_POOLS`` pools and their sums. Raises ProtocolError."""
        check_report(report)
        if len(report.pools) > MAX_REPORTED_POOLS:
            report = replace(report, pools=limit_pools(report.pools, max_pools=MAX_REPORTED_POOLS))
        self.report, self.undecoded_report, self._report_hash = report, b"", report_hash

    def split_messages(self, chunk: bytes, now: float) -> list[bytes]:
        """Return the messages that are complete with these bytes. Raises ProtocolError."""
        if not self.partial_message:
            self.partial_since = now
        lines = (self.partial_message + chunk).split(b"\n")
        if max(map(len, lines)) > MAX_MESSAGE_BYTES:
            raise ProtocolError("oversize", f"a message of more than {MAX_MESSAGE_BYTES} bytes")
        self.partial_message = lines.pop()
        if lines:
            self.partial_since = now
        return lines

    def send(self, message: Message) -> bool:
        """Send a whole message. False if the agent does not read its socket."""
        encoded = encode(message)
        try:
            return self.socket.send(encoded) == len(encoded)
        except OSError:
            return False

    def deliver_answer(self, message: FlushResult | AgentResponse) -> None:
        """Pass an answer to the call that waits for it, if one does."""
        self.unanswered_flushes.discard(message.id)
        answers: dict[str, asyncio.Future[Any]] = self.request_answers
        if isinstance(message, FlushResult):
            answers = self.flush_answers
        future = answers.get(message.id)
        if future is not None and not future.done():
            future.set_result(message)

    def cancel_waits(self) -> None:
        """Cancel all waits for an answer of this agent."""
        answers: list[asyncio.Future[Any]] = [*self.flush_answers.values(), *self.request_answers.values()]
        for future in answers:
            if not future.done():
                future.set_exception(ConnectionResetError("the agent disconnected"))


def check_hello(hello: Hello) -> None:
    """Check the names of workload, job and account, and the rank. Raises ProtocolError."""
    if len(hello.workload) > MAX_WORKLOAD_LENGTH:
        raise ProtocolError(
            "value", f"hello.workload: {hello.workload!r:.80} has more than {MAX_WORKLOAD_LENGTH} characters"
        )
    for name, text in (("job", hello.job), ("account", hello.account)):
        if text and not NAME_PATTERN.fullmatch(text):
            raise ProtocolError("value", f"hello.{name}: {text!r:.80} {NOT_A_NAME}")
    rank, size = hello.rank, hello.world_size
    if rank is None and size is None:
        return
    if rank is None or size is None or not 0 <= rank < size <= MAX_RANKS:
        raise ProtocolError("value", f"hello: rank {rank} is outside a world of size {size}")


def check_report(report: Report) -> None:
    """Check number and length of names that become labels. Raises ProtocolError."""
    names = [scope.name for scope in report.program.scopes]
    wrong_name = next((name for name in names if not NAME_PATTERN.fullmatch(name)), None)
    if wrong_name is not None:
        raise ProtocolError("value", f"report.program.scopes: {printable_text(wrong_name)!r:.80} {NOT_A_NAME}")
    if len(names) > MAX_SCOPES + 1:
        raise ProtocolError("value", f"report.program.scopes: {len(names)} scopes, more than {MAX_SCOPES + 1}")


def agent_report(
    identity: PeerIdentity, hello: Hello, report: Report, age_seconds: float, is_suspended: bool = False
) -> AgentReport:
    return AgentReport(
        pid=identity.pid,
        start_ticks=identity.start_ticks,
        uid=identity.uid,
        workload=hello.workload,
        age_seconds=age_seconds,
        frameworks=report.frameworks,
        flush_policy=report.flush_policy,
        pools=report.pools,
        program=report.program,
        host_pools=report.host_pools,
        limits=limits_of_reported_pools(report),
        allows_limit="limit" in hello.answers,
        admission=hello.admission,
        rank=hello.rank,
        world_size=hello.world_size,
        job=hello.job,
        account=hello.account,
        suspended=is_suspended,
        components=report.components[:MAX_COMPONENTS],
        suspendable=report.suspendable,
        resume_signals=report.resume_signals,
    )


def limits_of_reported_pools(report: Report) -> tuple[PoolLimit, ...]:
    """Return the limits of pools that the report contains; a program may have stated any others, or zero."""
    if not report.limits:
        return ()
    pools = {(pool.allocator, pool.device_uuid) for pool in report.pools}
    stated = {(each.allocator, each.device_uuid): each for each in report.limits}
    return tuple(limit for pool, limit in stated.items() if pool in pools and limit.limit_bytes)


@dataclass(frozen=True, slots=True)
class SocketLimits:
    """Limits of the socket, some by user; a user beyond the budget is read more slowly, without cost to others."""

    connections: int = 8000
    connections_per_uid: int = 128
    pending: int = 512
    """Connections without a hello; beyond this number none is accepted for a moment."""
    pending_per_uid: int = 16
    """Connections of a user beyond this number are accepted and closed at once, so they do not fill the queue."""
    hello_seconds: float = 2.0
    shared_hello_seconds: float = 0.5
    """``hello_seconds`` of a user who has other connections without a hello."""
    message_seconds: float = 5.0
    idle_seconds: float = 60.0
    answer_seconds: float = 0.5
    """Longer than a flush may take, so an agent can report why it failed."""
    stale_seconds: float = 15.0
    """Age in seconds at which a report is no longer used."""
    messages_per_second: int = 512
    bytes_per_second: int = 2 << 20
    reserved_descriptors: int = 64


class ReadBudget:
    """Token bucket of messages and bytes for one user."""

    def __init__(self, limits: SocketLimits, now: float) -> None:
        self._limits, self._filled_at = limits, now
        self.messages, self.bytes = float(limits.messages_per_second), float(limits.bytes_per_second)

    def wait_seconds(self, now: float) -> float:
        """Return the seconds until this user may be read again; 0 if at once."""
        limits, elapsed_seconds = self._limits, now - self._filled_at
        self._filled_at = now
        self.messages = min(limits.messages_per_second, self.messages + elapsed_seconds * limits.messages_per_second)
        self.bytes = min(limits.bytes_per_second, self.bytes + elapsed_seconds * limits.bytes_per_second)
        return max(0.0, -self.messages / limits.messages_per_second, -self.bytes / limits.bytes_per_second)


class UserUsage:
    """Connections and budgets of all users. ``pending`` connections have sent no hello."""

    def __init__(self, limits: SocketLimits) -> None:
        self._limits = limits
        self._connections: Counter[int] = Counter()
        self._pending: Counter[int] = Counter()
        self._budgets: dict[int, ReadBudget] = {}

    def admits(self, user: int) -> bool:
        limits = self._limits
        return self._connections[user] < limits.connections_per_uid and self._pending[user] < limits.pending_per_uid

    def add(self, user: int, now: float) -> ReadBudget:
        """Count a new connection, which is pending. Returns the user's budget."""
        self._connections[user] += 1
        self._pending[user] += 1
        return self._budgets.setdefault(user, ReadBudget(self._limits, now))

    def remove(self, user: int) -> None:
        self._connections[user] -= 1
        if not self._connections[user]:
            del self._connections[user]

    def pending(self, user: int | None = None) -> int:
        """Return the number of pending connections of a user, or of all."""
        return self._pending.total() if user is None else self._pending[user]

    def remove_pending(self, user: int) -> None:
        self._pending[user] -= 1
        if not self._pending[user]:
            del self._pending[user]

    def forget_idle_users(self, now: float) -> None:
        """Forget the full budgets of users without a connection."""
        for user in [user for user in self._budgets if user not in self._connections]:
            if self._budgets[user].wait_seconds(now) == 0:
                del self._budgets[user]
