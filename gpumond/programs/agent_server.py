"""Server of the agents' socket: connections, the newest report of each agent, requests to agents and their answers.

Every uid of the machine may connect, so no peer is trusted. The kernel states the identity of a peer; one in a PID
namespace that is not visible here is identified by its connection and its uid. Messages and connections of one user do
not delay other users, and the connection of a peer that violates the protocol is closed and counted.
``agent_connection`` has the state of one peer, the limits, and what each user uses of them.

This module does *not* cover: the meaning of reports (``tick``) and when to flush (the feature ``flush``).
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import select
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace

from gpumond.facts.errors import ProtocolError
from gpumond.facts.messages import (
    MAX_MESSAGE_BYTES,
    VERSION,
    AgentRequest,
    AgentResponse,
    BorrowRequest,
    BorrowResponse,
    CancelFlush,
    FlushCommand,
    FlushResult,
    Goodbye,
    Hello,
    Message,
    Report,
    decode,
)
from gpumond.facts.program import ProcessKey
from gpumond.facts.snapshot import AgentReport, ProcessEnd
from gpumond.host.peer import (
    CREDENTIALS_SPACE,
    PeerIdentity,
    identify_peer,
    peer_pidfd,
    peer_uid,
    person_uid,
    sender_pid,
)
from gpumond.host.tasks import Tasks
from gpumond.programs.agent_connection import (
    AgentConnection,
    ResponseT,
    SocketLimits,
    UserUsage,
    agent_report,
    check_hello,
)

log = logging.getLogger(__name__)


def identity_of(report: AgentReport) -> PeerIdentity:
    return PeerIdentity(report.pid, report.start_ticks, report.uid)


MAX_ACCEPTED_AT_ONCE = 16
REJECTED_PAUSE_SECONDS = 0.004
"""Pause after each ``MAX_ACCEPTED_AT_ONCE`` rejected connections. A full queue of 4096 then takes less than 2 s."""
REPORT_PREFIX = b'{"v":%d,"type":"report"' % VERSION
READING_PAUSE_SECONDS = 0.1
"""Pause after a reading of the connections: a wake-up for each message takes longer than to read it."""
MAX_EXITED_REPORTS = 256
MAX_ENDS = 8192
ANSWER_TIMEOUT_SECONDS = 30.0
NO_ANSWER_WHILE_SUSPENDED = "the program is suspended and can't respond; resume it first: gpumond resume --pid {}"
WHY_UNSUPPORTED = {
    "limit": "doesn't allow limits; start it with gpumond run --allow-limit, gpumond.agent.start(allow_limit=True) or "
    "GPUMOND_ALLOW_LIMIT=1",
    "end": "has no function for requests to exit; register one with gpumond.agent.on_end_request",
}
"""Why a program doesn't answer a request that it would have to allow."""


class AgentServer:
    """The daemon's end of all agent connections. Runs on the event loop that calls ``serve``."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        limits: SocketLimits = SocketLimits(),
        on_reports: Callable[[int], None] = lambda count: None,
        on_rejection: Callable[[str], None] = lambda reason: None,
        clock: Callable[[], float] = time.monotonic,
        find_new_listener: Callable[[], socket.socket | None] = lambda: None,
    ) -> None:
        """``find_new_listener`` returns another listener if the socket's file was removed; called once a second."""
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - limits.reserved_descriptors
        self._limits = replace(limits, connections=max(1, min(limits.connections, descriptors // 2)))  # a pidfd each
        self._listener, self._clock, self._find_new_listener = listener, clock, find_new_listener
        self._on_reports, self._on_rejection = on_reports, on_rejection
        self._peers: dict[int, AgentConnection] = {}
        self._arrivals = select.epoll()
        """The connections that have sent a hello; those that have not are read by the event loop."""
        self._awaited_answers = 0
        """Number of answers that are awaited."""
        self._exited_reports: deque[AgentReport] = deque(maxlen=MAX_EXITED_REPORTS)
        self._ends: deque[ProcessEnd] = deque(maxlen=MAX_ENDS)
        self._usage = UserUsage(self._limits)
        self._reports_received = 0
        self._suspended: Collection[ProcessKey] = frozenset()
        self._borrow: Callable[[PeerIdentity, BorrowRequest], Awaitable[BorrowResponse]] | None = None
        self._borrowers: set[PeerIdentity] = set()
        self._borrow_tasks = Tasks()
        self._accepting = False
        self._paused_for_hellos = False
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._accept_pause: asyncio.TimerHandle | None = None
        self._reading_pause: asyncio.TimerHandle | None = None

    def serve(self) -> None:
        self._listener.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._resume_reading()
        self._sweep()

    def close(self) -> None:
        for timer in filter(None, (self._sweep_timer, self._accept_pause, self._reading_pause)):
            timer.cancel()
        if not self._arrivals.closed:
            self._loop.remove_reader(self._arrivals.fileno())
        for task in self._borrow_tasks:
            task.cancel()
        self._stop_accepting()
        self._paused_for_hellos = False
        self._listener.close()  # before the drops: an agent that reconnects at once must wait for the next daemon
        for peer in list(self._peers.values()):
            self._drop(peer)
        self._arrivals.close()

    def receive(self) -> None:
        """Read what has arrived: first of those that were read longest ago, since a user's programs share a budget."""
        ready = [] if self._arrivals.closed else [self._peers[descriptor] for descriptor, _ in self._arrivals.poll(0)]
        for peer in sorted(ready, key=lambda peer: peer.received_at):
            if self._peers.get(peer.socket.fileno()) is peer:
                self._on_readable(peer)

    def set_suspended(self, suspended: Collection[ProcessKey]) -> None:
        """Set the suspended processes. Their agents may be silent: they stay connected, with their last report."""
        resumed = set(self._suspended).difference(suspended)
        self._suspended = suspended
        for peer in self._peers.values() if resumed else ():
            if peer.identity.process in resumed:
                peer.resumed_at = self._clock()

    def take_ends(self) -> tuple[ProcessEnd, ...]:
        """Return the programs whose agent reported their ending since the last call."""
        ends = tuple(self._ends)
        self._ends.clear()
        return ends

    def take_exited_reports(self) -> tuple[AgentReport, ...]:
        """Return the last report of each agent that left since the last call, if it contains out-of-memory errors."""
        exited_reports = tuple(self._exited_reports)
        self._exited_reports.clear()
        return exited_reports

    def reports(self) -> tuple[AgentReport, ...]:
        """Return the newest report of every process whose agent is connected and reported recently."""
        self.receive()
        newest: dict[PeerIdentity, AgentReport] = {}
        for peer in list(self._peers.values()):
            report = None if self._is_silent(peer) else self._agent_report(peer)
            if report is not None:
                newest[peer.identity] = _newer_report(report, newest.get(peer.identity))
        self._on_reports(self._reports_received)
        self._reports_received = 0
        return tuple(newest.values())

    def report(self, identity: PeerIdentity) -> AgentReport | None:
        """Return the newest report of one process, as `reports` does, without decoding those of others."""
        self.receive()
        newest: AgentReport | None = None
        for peer in [peer for peer in self._peers.values() if peer.identity == identity]:
            report = None if self._is_silent(peer) else self._agent_report(peer)
            newest = newest if report is None else _newer_report(report, newest)
        return newest

    def silent_reports(self) -> tuple[AgentReport, ...]:
        """Return the last report of each agent that is connected and reported too long ago."""
        reports = (self._agent_report(peer) for peer in list(self._peers.values()) if self._is_silent(peer))
        return tuple(report for report in reports if report is not None)

    async def flush(self, identity: PeerIdentity, request: FlushCommand) -> FlushResult | None:
        """Send a flush to one agent and return its answer: None if it timed out or the agent disconnected."""
        peer = self._connection_of(identity)
        if peer is None:
            return None
        seconds = request.timeout_seconds + self._limits.answer_seconds
        answer = await self._send_and_await(peer, request, peer.flush_answers, seconds)
        if answer is None:
            peer.unanswered_flushes.add(request.id)
        return answer

    async def ask(
        self, identity: PeerIdentity, request: AgentRequest, seconds: float = ANSWER_TIMEOUT_SECONDS
    ) -> AgentResponse | None:
        """Send a command as `flush` does. A command that the agent does not support, or its program forbids, is
        not sent, and none to a suspended program.
        """
        peer = self._connection_of(identity)
        if peer is None or peer.hello is None:
            return None
        if request.kind not in peer.hello.answers:
            why = WHY_UNSUPPORTED.get(request.kind) if peer.hello.answers else None
            name = f"{peer.hello.workload or 'a program'} (pid {identity.pid})"
            return AgentResponse(request.id, f"{name} {why or 'has an agent that is too old for this request'}")
        if identity.process in self._suspended:
            return AgentResponse(request.id, NO_ANSWER_WHILE_SUSPENDED.format(identity.process.pid))
        return await self._send_and_await(peer, request, peer.request_answers, seconds)

    async def _send_and_await(
        self,
        peer: AgentConnection,
        request: FlushCommand | AgentRequest,
        answers: dict[str, asyncio.Future[ResponseT]],
        seconds: float,
    ) -> ResponseT | None:
        """Send a request and await its answer. An agent that wakes up late finds a CancelFlush after the request."""
        if not self._send(peer, request):
            return None
        answer = answers[request.id] = self._loop.create_future()
        self._awaited_answers += 1
        self._resume_reading()
        try:
            return await asyncio.wait_for(answer, seconds)
        except (asyncio.TimeoutError, ConnectionError):
            self._send(peer, CancelFlush(request.id))
            return None
        finally:
            self._awaited_answers -= 1
            answers.pop(request.id, None)

    def is_flushing(self, identity: PeerIdentity) -> bool:
        """Return True if a flush of that process may still run: its agent is connected and has not answered."""
        return any(
            peer.flush_answers or peer.unanswered_flushes for peer in self._peers.values() if peer.identity == identity
        )

    def _connection_of(self, identity: PeerIdentity) -> AgentConnection | None:
        peers = (peer for peer in self._peers.values() if peer.identity == identity)
        reporting = [peer for peer in peers if peer.report or peer.undecoded_report]
        return max(reporting, key=lambda peer: peer.received_at, default=None)

    def _is_suspended(self, peer: AgentConnection) -> bool:
        return bool(self._suspended) and peer.identity.process in self._suspended

    def _is_silent(self, peer: AgentConnection) -> bool:
        silence_seconds = self._clock() - max(peer.received_at, peer.resumed_at)
        return silence_seconds > self._limits.stale_seconds and not self._is_suspended(peer)

    def _agent_report(self, peer: AgentConnection) -> AgentReport | None:
        report = self._decode_newest_report(peer)
        if peer.hello is None or report is None:
            return None
        age_seconds = self._clock() - peer.received_at
        return agent_report(peer.identity, peer.hello, report, age_seconds, self._is_suspended(peer))

    def _decode_newest_report(self, peer: AgentConnection) -> Report | None:
        """Return a peer's newest report; None if that is malformed or the agent has disconnected."""
        try:
            report = peer.newest_report()
        except ProtocolError as error:
            self._drop_invalid(peer, error)
        return report if self._peers.get(peer.socket.fileno()) is peer else None

    def _send(self, peer: AgentConnection, message: Message) -> bool:
        """Send a whole message and return True; a peer that does not read its socket is dropped."""
        if peer.send(message):
            return True
        self._drop(peer, "unread")
        return False

    def _accept(self) -> None:
        admitted = False
        for _ in range(MAX_ACCEPTED_AT_ONCE):
            if self._usage.pending() >= self._limits.pending or len(self._peers) >= self._limits.connections:
                self._paused_for_hellos = len(self._peers) < self._limits.connections
                self._stop_accepting()
                return
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                log.warning("can't accept agents at the moment: %s", error)
                self._stop_accepting()
                return
            admitted |= self._admit(connection)
        if not admitted:
            self._stop_accepting()
            self._accept_pause = self._loop.call_later(REJECTED_PAUSE_SECONDS, self._resume_accepting)

    def _admit(self, connection: socket.socket) -> bool:
        """Return False if the connection is rejected and closed."""
        user = person_uid(peer_uid(connection))
        if not self._usage.admits(user):
            self._reject(connection, "crowd")
            return False
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        pidfd = peer_pidfd(connection)
        identity = identify_peer(connection, pidfd)
        if identity is None:
            self._reject(connection, "identity")
            if pidfd is not None:
                os.close(pidfd)
            return False
        now = self._clock()
        peer = AgentConnection(connection, identity, pidfd, user, self._usage.add(user, now), now)
        self._peers[connection.fileno()] = peer
        self._watch(peer)
        if pidfd is not None:
            self._loop.add_reader(pidfd, self._drop_ended, peer)  # readable when the process has exited
        self._on_readable(peer)  # a hello that waited in the queue does not count as pending
        if peer.hello is None:
            self._loop.call_later(self._limits.shared_hello_seconds, self._on_hello_timeout, peer)
        return True

    def _on_hello_timeout(self, peer: AgentConnection) -> None:
        """Close a connection without a hello whose user has others; a single one has until ``hello_seconds``."""
        if peer.hello is None and self._usage.pending(peer.user) > 1:
            self._drop(peer, "hello_timeout")

    def _remove_pending(self, user: int) -> None:
        self._usage.remove_pending(user)
        if self._paused_for_hellos and self._usage.pending() <= self._limits.pending // 2:
            self._resume_accepting()

    def _reject(self, connection: socket.socket, reason: str) -> None:
        self._on_rejection(reason)
        connection.close()

    def _resume_reading(self) -> None:
        """End the pause between two readings of the connections."""
        if self._reading_pause is not None:
            self._reading_pause.cancel()
        self._loop.add_reader(self._arrivals.fileno(), self._read_arrivals)

    def _read_arrivals(self) -> None:
        """Read what has arrived, and pause unless an answer is awaited."""
        self.receive()
        if not self._awaited_answers:
            self._loop.remove_reader(self._arrivals.fileno())
            self._reading_pause = self._loop.call_later(READING_PAUSE_SECONDS, self._resume_reading)

    def _watch(self, peer: AgentConnection) -> None:
        if peer.hello is None:
            self._loop.add_reader(peer.socket.fileno(), self._on_readable, peer)
        else:
            self._arrivals.register(peer.socket.fileno(), select.EPOLLIN)

    def _unwatch(self, peer: AgentConnection) -> None:
        if peer.hello is None:
            self._loop.remove_reader(peer.socket.fileno())
        else:
            self._arrivals.unregister(peer.socket.fileno())

    def _on_readable(self, peer: AgentConnection) -> None:
        now = self._clock()
        if (wait_seconds := peer.budget.wait_seconds(now)) > 0:
            self._on_rejection("rate")
            self._unwatch(peer)
            self._loop.call_later(max(wait_seconds, 0.1), self._watch_again, peer)
            return
        try:
            chunk, ancillary, _, _ = peer.socket.recvmsg(MAX_MESSAGE_BYTES, CREDENTIALS_SPACE)
        except BlockingIOError:
            return
        except OSError:
            chunk, ancillary = b"", []
        if not chunk:
            self._drop(peer)
            return
        peer.budget.bytes -= len(chunk)
        if sender_pid(ancillary) not in (None, peer.identity.pid):
            self._drop(peer, "foreign_sender")  # a forked child, or a passed descriptor
            return
        try:
            for message in peer.split_messages(chunk, now):
                peer.budget.messages -= 1
                if peer.report is not None and message.startswith(REPORT_PREFIX):
                    peer.undecoded_report, peer.received_at = message, now
                    self._reports_received += 1
                else:
                    self._handle(peer, decode(message), now)
        except ProtocolError as error:
            self._drop_invalid(peer, error)

    def _drop_invalid(self, peer: AgentConnection, error: ProtocolError) -> None:
        log.info("connection of the agent with pid %d, uid %d, closed: %s", peer.identity.pid, peer.identity.uid, error)
        self._drop(peer, error.reason)

    def _handle(self, peer: AgentConnection, message: Message, now: float) -> None:
        if peer.hello is None:
            if not isinstance(message, Hello):
                raise ProtocolError("hello", "the first message isn't a hello")
            check_hello(message)
            self._unwatch(peer)
            peer.hello = message
            self._watch(peer)
            self._remove_pending(peer.user)
        elif isinstance(message, Hello):
            raise ProtocolError("hello", "a second hello")
        elif isinstance(message, Report):
            peer.set_report(message)
            peer.received_at = now
            self._reports_received += 1
        elif isinstance(message, (AgentResponse, FlushResult)):
            peer.deliver_answer(message)
        elif isinstance(message, BorrowRequest):
            self._start_borrow(peer, message)
        elif isinstance(message, Goodbye):
            if message.ending is not None:
                self._ends.append(ProcessEnd(peer.identity.pid, peer.identity.start_ticks, message.ending))
            self._drop(peer)
        else:
            raise ProtocolError("type", f"an agent can't send {type(message).__name__}")

    def on_borrow(self, borrow: Callable[[PeerIdentity, BorrowRequest], Awaitable[BorrowResponse]]) -> None:
        """Answer requests to borrow memory with this function."""
        self._borrow = borrow

    def _start_borrow(self, peer: AgentConnection, request: BorrowRequest) -> None:
        """Answer a request to borrow memory. A second one of the same program is refused at once."""
        if self._borrow is None or peer.identity in self._borrowers:
            self._send(peer, BorrowResponse(request.id, False, reason="another request of this program is in progress"))
            return
        self._borrowers.add(peer.identity)
        self._borrow_tasks.start(self._answer_borrow(peer, request, self._borrow))

    async def _answer_borrow(
        self,
        peer: AgentConnection,
        request: BorrowRequest,
        borrow: Callable[[PeerIdentity, BorrowRequest], Awaitable[BorrowResponse]],
    ) -> None:
        try:
            answer = await borrow(peer.identity, request)
        finally:
            self._borrowers.discard(peer.identity)
        if self._peers.get(peer.socket.fileno()) is peer:
            self._send(peer, answer)

    def _watch_again(self, peer: AgentConnection) -> None:
        if self._peers.get(peer.socket.fileno()) is peer:
            self._watch(peer)

    def _drop_ended(self, peer: AgentConnection) -> None:
        """Read the last messages of a process that has ended, and drop it."""
        self._on_readable(peer)
        self._drop(peer)

    def _drop(self, peer: AgentConnection, reason: str | None = None) -> None:
        if reason is None:
            self._decode_newest_report(peer)  # its last messages
        descriptor = peer.socket.fileno()
        if self._peers.get(descriptor) is not peer:
            return
        if reason is not None:
            self._on_rejection(reason)
        del self._peers[descriptor]
        if peer.hello is not None and peer.report is not None and peer.report.program.ooms:
            report = agent_report(peer.identity, peer.hello, peer.report, self._clock() - peer.received_at)
            self._exited_reports.append(report)
        self._usage.remove(peer.user)
        if peer.hello is None:
            self._remove_pending(peer.user)
        self._loop.remove_reader(descriptor)
        peer.socket.close()
        if peer.pidfd is not None:
            self._loop.remove_reader(peer.pidfd)
            os.close(peer.pidfd)
        peer.cancel_waits()

    def _sweep(self) -> None:
        """Drop peers that have timed out, and accept again. Runs once a second."""
        now, limits = self._clock(), self._limits
        for peer in list(self._peers.values()):
            if peer.hello is None and now - peer.received_at > limits.hello_seconds:
                self._drop(peer, "hello_timeout")
            elif peer.partial_message and now - peer.partial_since > limits.message_seconds:
                self._drop(peer, "frame_timeout")
            elif (
                now - max(peer.received_at, peer.resumed_at) > limits.idle_seconds
                and peer.identity.process not in self._suspended
            ):
                self._drop(peer, "idle")
        self._usage.forget_idle_users(now)
        self._replace_listener()
        self._resume_accepting()
        self._sweep_timer = self._loop.call_later(1.0, self._sweep)

    def _replace_listener(self) -> None:
        self._stop_accepting()  # its descriptor may be closed, and used again
        if listener := self._find_new_listener():
            listener.setblocking(False)
            self._listener = listener

    def _resume_accepting(self) -> None:
        if not self._accepting:
            self._accepting, self._paused_for_hellos = True, False
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _stop_accepting(self) -> None:
        if self._accepting:
            self._accepting = False
            self._loop.remove_reader(self._listener.fileno())


def _newer_report(report: AgentReport, other: AgentReport | None) -> AgentReport:
    return report if other is None or report.age_seconds < other.age_seconds else other
