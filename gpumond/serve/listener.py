"""Accepts HTTP connections within limits.

At the limit, a new connection is accepted, and the connection that has waited longest among those of the user with the
most connections is closed. A client that sends its request is therefore served, independent of the number of clients
that send none. A connection whose request is being answered is never closed. Some connections are reserved for
/metrics and the probes.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from gpumond.host.machine import RESERVED_CONNECTIONS
from gpumond.host.peer import loopback_uid, peer_uid
from gpumond.host.runtime_directory import BACKLOG_CONNECTIONS
from gpumond.host.tasks import Tasks
from gpumond.serve.limits import LOOPBACK, SharedResource, user_of

log = logging.getLogger(__name__)

ClientState = Literal["waiting", "idle", "streaming", "serving"]
CLOSABLE_STATES: tuple[ClientState, ...] = ("idle", "streaming")
"""States in which a connection may be closed for another one, after those that have sent no request."""

HEAD_TIMEOUT_SECONDS = HANDSHAKE_TIMEOUT_SECONDS = 10.0
PEEK_INTERVAL_SECONDS = 0.1
MAX_ACCEPTS = 8
ACCEPT_PAUSE_SECONDS = 0.1
GRACE_SECONDS = 0.5
"""Time for answers that are being sent when the listener is closed. A stream of events would never end by itself."""
PEEKED_BYTES = 8192
TLS_HANDSHAKE = b"\x16"
EXHAUSTION_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(slots=True, eq=False)
class HttpPeer:
    """One connection. ``uid`` is the peer's on a Unix socket, where it grants permissions; ``user`` is the one for whom
    it counts. ``reserved``: it has one of the places for /metrics and the probes."""

    user: str
    uid: int | None
    since: float
    reserved: bool = False
    stage: Literal["waiting", "idle", "serving"] = "waiting"
    close: Callable[[], object] = field(default=lambda: None)
    has_response_started: Callable[[], bool] = field(default=lambda: False)
    """Return True if the answer has begun."""

    def enter(self, stage: Literal["waiting", "idle", "serving"], now: float) -> None:
        self.stage, self.since = stage, now

    @property
    def state(self) -> ClientState:
        return "streaming" if self.stage == "serving" and self.has_response_started() else self.stage


def first_to_close(peers: Sequence[HttpPeer]) -> HttpPeer | None:
    """Return the connection to close for a new one; None if all are being served. ``peers`` are in order of arrival."""
    waiting = next((peer for peer in peers if peer.stage == "waiting"), None)
    if waiting is not None:
        return waiting
    closable = [peer for peer in peers if peer.state in CLOSABLE_STATES]
    return min(closable, key=lambda peer: (CLOSABLE_STATES.index(peer.state), peer.since), default=None)


class HttpListener:
    """Accepts on ``listeners`` until it is closed. Runs on the event loop that calls ``open``."""

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        protocol: Callable[[HttpPeer], asyncio.Protocol],
        *,
        connections: int,
        per_user: int | None = None,
        reserved: int = RESERVED_CONNECTIONS,
        tls: Callable[[], ssl.SSLContext | None] = lambda: None,
        count_rejection: Callable[[str], None] = lambda reason: None,
        uid_of_peer: Callable[[socket.socket], int | None] = loopback_uid,
    ) -> None:
        self._listeners, self._protocol, self._tls = listeners, protocol, tls
        self._count_rejection, self._uid_of_peer = count_rejection, uid_of_peer
        self._connections: SharedResource[HttpPeer] = SharedResource(connections, per_user)
        self._reserved: SharedResource[HttpPeer] = SharedResource(reserved)
        self._starting = Tasks()
        self._is_closed = False

    def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        for listener in self._listeners:
            self._accept_on(listener)

    def add(self, listener: socket.socket) -> None:
        """Accept on another socket."""
        self._listeners = (*self._listeners, listener)
        self._accept_on(listener)

    def _accept_on(self, listener: socket.socket) -> None:
        listener.listen(BACKLOG_CONNECTIONS)
        listener.setblocking(False)
        self._loop.add_reader(listener.fileno(), self._accept, listener)

    def close(self) -> None:
        self._is_closed = True
        for listener in self._listeners:
            if listener.fileno() >= 0:
                self._loop.remove_reader(listener.fileno())
                listener.close()
        for task in self._starting:
            task.cancel()
        for peer in self._peers():
            if peer.stage == "waiting":
                peer.close()
        self._loop.call_later(GRACE_SECONDS, self._close_remaining)

    def _close_remaining(self) -> None:
        for peer in self._peers():
            peer.close()

    def _peers(self) -> list[HttpPeer]:
        return [
            peer
            for resource in (self._connections, self._reserved)
            for user in resource.users()
            for peer in resource.claims(user)
        ]

    async def wait_closed(self) -> None:
        await self._starting.finish()

    def remove(self, peer: HttpPeer) -> None:
        self._resource_of(peer).remove(peer.user, peer)

    def _resource_of(self, peer: HttpPeer) -> SharedResource[HttpPeer]:
        return self._reserved if peer.reserved else self._connections

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(MAX_ACCEPTS):
            try:
                connection, address = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in EXHAUSTION_ERRORS:
                    self._pause_accepting(listener, error)
                    return
                continue  # the client closed it before it was accepted
            uid = peer_uid(connection) if connection.family == socket.AF_UNIX else None
            peer = HttpPeer(
                user_of(uid) if uid is not None else self._user(connection, address[0]), uid, time.monotonic()
            )
            if self._make_room(peer):
                self._admit(connection, peer)
            else:
                self._count_rejection("crowd")
                connection.close()

    def _make_room(self, peer: HttpPeer) -> bool:
        connections, reserved = self._connections, self._reserved
        if connections.admits(peer.user):
            return True
        if connections.used_by(peer.user) >= connections.per_user:
            if self._close_one(connections, [peer.user]):
                return True
        elif self._close_one(connections, connections.users()):
            return True
        peer.reserved = True
        return reserved.admits(peer.user) or self._close_one(reserved, reserved.users())

    def _close_one(self, resource: SharedResource[HttpPeer], users: Sequence[str]) -> bool:
        """Close a connection of the first of these users that has one which may be closed; False if none has."""
        closed_peer = next((found for user in users if (found := first_to_close(resource.claims(user)))), None)
        if closed_peer is None:
            return False
        self._count_rejection("crowd")
        self.remove(closed_peer)
        closed_peer.close()
        return True

    def _admit(self, connection: socket.socket, peer: HttpPeer) -> None:
        connection.setblocking(False)
        self._resource_of(peer).add(peer.user, peer)
        if peer.uid is None and self._tls() is not None:
            self._start(connection, peer)
            return
        timer = self._loop.call_later(HEAD_TIMEOUT_SECONDS, self._on_timeout, peer)
        peer.close = partial(self._abandon, connection, peer, timer)
        if not self._settle(connection, peer, timer):
            self._loop.add_reader(connection.fileno(), self._on_readable, connection, peer, timer)

    def _on_readable(self, connection: socket.socket, peer: HttpPeer, timer: asyncio.TimerHandle) -> None:
        self._loop.remove_reader(connection.fileno())
        self._settle_later(connection, peer, timer)

    def _settle_later(self, connection: socket.socket, peer: HttpPeer, timer: asyncio.TimerHandle) -> None:
        if self._resource_of(peer).has(peer.user, peer) and not self._settle(connection, peer, timer):
            self._loop.call_later(PEEK_INTERVAL_SECONDS, self._settle_later, connection, peer, timer)

    def _settle(self, connection: socket.socket, peer: HttpPeer, timer: asyncio.TimerHandle) -> bool:
        """Return True if the connection needs no further look: its request's head has arrived, or it was closed.

        A client that begins with TLS sends no head: the response to its bad request tells it that this is HTTP.

        Until then it costs nothing but its descriptor; nearly every client sends the whole head at once.
        """
        try:
            head = connection.recv(PEEKED_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            head = b""
        if not head:
            peer.close()
            return True
        if b"\r\n\r\n" not in head and len(head) < PEEKED_BYTES and not head.startswith(TLS_HANDSHAKE):
            return False
        timer.cancel()
        peer.stage = "serving"  # else a flood could evict it before it is read
        self._start(connection, peer)
        return True

    def _on_timeout(self, peer: HttpPeer) -> None:
        self._count_rejection("slow")
        peer.close()

    def _abandon(self, connection: socket.socket, peer: HttpPeer, timer: asyncio.TimerHandle) -> None:
        timer.cancel()
        self.remove(peer)
        self._loop.remove_reader(connection.fileno())
        connection.close()

    def _start(self, connection: socket.socket, peer: HttpPeer) -> None:
        peer.close = self._starting.start(self._connect(connection, peer)).cancel

    async def _connect(self, connection: socket.socket, peer: HttpPeer) -> None:
        tls = None if peer.uid is not None else self._tls()
        seconds = HANDSHAKE_TIMEOUT_SECONDS if tls else None
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._protocol(peer), connection, ssl=tls, ssl_handshake_timeout=seconds
            )
        except (OSError, ssl.SSLError):  # no TLS, a wrong certificate, too slow, or closed
            self._count_rejection("handshake")
            self.remove(peer)
            connection.close()
        except asyncio.CancelledError:
            self.remove(peer)
            connection.close()
            raise

    def _pause_accepting(self, listener: socket.socket, error: OSError) -> None:
        """Free a descriptor, and accept again after a pause."""
        log.warning("can't accept connections at the moment: %s", error.strerror)
        self._count_rejection("descriptors")
        self._close_one(self._connections, self._connections.users())
        self._loop.remove_reader(listener.fileno())
        self._loop.call_later(ACCEPT_PAUSE_SECONDS, self._accept_again, listener)

    def _accept_again(self, listener: socket.socket) -> None:
        if not self._is_closed:
            self._loop.add_reader(listener.fileno(), self._accept, listener)

    def _user(self, connection: socket.socket, address: str) -> str:
        user = user_of(None, address)
        return user if user != LOOPBACK else user_of(self._uid_of_peer(connection), address)
