"""Accepts HTTP connections within bounds.

Beyond a bound the newest is accepted, and of the user with most connections the one that has waited longest is closed:
a client that sends its request is served however many others send none. A connection whose request is being worked on
is never closed; where a user has only such ones, or all have, some places are left for /metrics and the probes.
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

from gpumond.api.shares import LOOPBACK, Shares, user_of
from gpumond.host.fd_limits import RESERVED_CONNECTIONS
from gpumond.host.peer_credentials import loopback_uid, peer_uid

log = logging.getLogger(__name__)

State = Literal["waiting", "idle", "streaming", "serving"]
LEAVING: tuple[State, ...] = ("idle", "streaming")
"""In whose place another may come, after those who have not said what they want."""

HEAD_SECONDS = HANDSHAKE_SECONDS = 10.0
LISTEN_SECONDS = 0.1
ACCEPTS = 8
BACKLOG = 4096
PAUSE_SECONDS = 0.1
GRACE_SECONDS = 0.5
"""For answers that are under way when the door is closed. A stream of events would never end by itself."""
PEEKED_BYTES = 8192
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(slots=True, eq=False)
class HttpPeer:
    """One connection. ``uid`` is the peer's on a Unix socket, where it says who may do what; ``user`` is whom it counts
    for. ``reserved``: it has one of the places for /metrics and the probes."""

    user: str
    uid: int | None
    since: float
    reserved: bool = False
    stage: Literal["waiting", "idle", "serving"] = "waiting"
    leave: Callable[[], object] = field(default=lambda: None)
    begun: Callable[[], bool] = field(default=lambda: False)
    """Whether its answer has begun."""

    def turn(self, stage: Literal["waiting", "idle", "serving"], now: float) -> None:
        self.stage, self.since = stage, now

    @property
    def state(self) -> State:
        return "streaming" if self.stage == "serving" and self.begun() else self.stage


def first_to_leave(visits: Sequence[HttpPeer]) -> HttpPeer | None:
    """Who makes room, of visits in the order in which they came; None if all are being served."""
    waiting = next((visit for visit in visits if visit.stage == "waiting"), None)
    if waiting is not None:
        return waiting
    leaving = [visit for visit in visits if visit.state in LEAVING]
    return min(leaving, key=lambda visit: (LEAVING.index(visit.state), visit.since), default=None)


class HttpListener:
    """Accepts on ``listeners`` until it is closed. Runs on the event loop that calls ``open``."""

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        welcome: Callable[[HttpPeer], asyncio.Protocol],
        *,
        connections: int,
        per_user: int | None = None,
        reserved: int = RESERVED_CONNECTIONS,
        tls: Callable[[], ssl.SSLContext | None] = lambda: None,
        rejected: Callable[[str], None] = lambda reason: None,
        clock: Callable[[], float] = time.monotonic,
        owner: Callable[[socket.socket], int | None] = loopback_uid,
    ) -> None:
        self._listeners, self._welcome, self._tls = listeners, welcome, tls
        self._rejected, self._clock, self._owner = rejected, clock, owner
        self._visits: Shares[HttpPeer] = Shares(connections, per_user)
        self._reserved: Shares[HttpPeer] = Shares(reserved)
        self._welcoming: set[asyncio.Task[None]] = set()
        self._closed = False

    def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        for listener in self._listeners:
            listener.listen(BACKLOG)
            listener.setblocking(False)
            self._loop.add_reader(listener.fileno(), self._accept, listener)

    def close(self) -> None:
        self._closed = True
        for listener in self._listeners:
            if listener.fileno() >= 0:
                self._loop.remove_reader(listener.fileno())
                listener.close()
        for task in self._welcoming:
            task.cancel()
        for visit in self._all():
            if visit.stage == "waiting":
                visit.leave()
        self._loop.call_later(GRACE_SECONDS, self._clear)

    def _clear(self) -> None:
        for visit in self._all():
            visit.leave()

    def _all(self) -> list[HttpPeer]:
        return [v for shares in (self._visits, self._reserved) for user in shares.users() for v in shares.holders(user)]

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._welcoming, return_exceptions=True)

    def gone(self, visit: HttpPeer) -> None:
        self._shares(visit).remove(visit.user, visit)

    def _shares(self, visit: HttpPeer) -> Shares[HttpPeer]:
        return self._reserved if visit.reserved else self._visits

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTS):
            try:
                connection, address = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in EXHAUSTED:
                    self._exhausted(listener, error)
                    return
                continue  # that one left before it was accepted
            uid = peer_uid(connection) if connection.family == socket.AF_UNIX else None
            visit = HttpPeer(
                user_of(uid) if uid is not None else self._user(connection, address[0]), uid, self._clock()
            )
            if self._room_for(visit):
                self._let_in(connection, visit)
            else:
                self._rejected("crowd")
                connection.close()

    def _room_for(self, visit: HttpPeer) -> bool:
        visits, reserved = self._visits, self._reserved
        if visits.admits(visit.user):
            return True
        if visits.of(visit.user) >= visits.each:
            if self._close_one(visits, [visit.user]):
                return True
        elif self._close_one(visits, visits.users()):
            return True
        visit.reserved = True
        return reserved.admits(visit.user) or self._close_one(reserved, reserved.users())

    def _close_one(self, shares: Shares[HttpPeer], users: Sequence[str]) -> bool:
        """Of the first of these users that has one which may be closed."""
        longest = next((found for user in users if (found := first_to_leave(shares.holders(user)))), None)
        if longest is None:
            return False
        self._rejected("crowd")
        self.gone(longest)
        longest.leave()
        return True

    def _let_in(self, connection: socket.socket, visit: HttpPeer) -> None:
        connection.setblocking(False)
        self._shares(visit).add(visit.user, visit)
        if visit.uid is None and self._tls() is not None:
            self._begin(connection, visit)
            return
        patience = self._loop.call_later(HEAD_SECONDS, self._too_slow, visit)
        visit.leave = partial(self._abandon, connection, visit, patience)
        if not self._listen(connection, visit, patience):
            self._loop.add_reader(connection.fileno(), self._stirred, connection, visit, patience)

    def _stirred(self, connection: socket.socket, visit: HttpPeer, patience: asyncio.TimerHandle) -> None:
        self._loop.remove_reader(connection.fileno())
        self._again(connection, visit, patience)

    def _again(self, connection: socket.socket, visit: HttpPeer, patience: asyncio.TimerHandle) -> None:
        if self._shares(visit).has(visit.user, visit) and not self._listen(connection, visit, patience):
            self._loop.call_later(LISTEN_SECONDS, self._again, connection, visit, patience)

    def _listen(self, connection: socket.socket, visit: HttpPeer, patience: asyncio.TimerHandle) -> bool:
        """Whether this is settled: it asks, or has left. Until a whole request's head is there a visit costs nothing
        but its descriptor, and nearly every client that means to ask has it there at once."""
        try:
            said = connection.recv(PEEKED_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            said = b""
        if not said:
            visit.leave()
            return True
        if b"\r\n\r\n" not in said and len(said) < PEEKED_BYTES:
            return False
        patience.cancel()
        visit.stage = "serving"  # or a flood would push it out before it is read
        self._begin(connection, visit)
        return True

    def _too_slow(self, visit: HttpPeer) -> None:
        self._rejected("slow")
        visit.leave()

    def _abandon(self, connection: socket.socket, visit: HttpPeer, patience: asyncio.TimerHandle) -> None:
        patience.cancel()
        self.gone(visit)
        self._loop.remove_reader(connection.fileno())
        connection.close()

    def _begin(self, connection: socket.socket, visit: HttpPeer) -> None:
        task = self._loop.create_task(self._greet(connection, visit))
        visit.leave = task.cancel
        self._welcoming.add(task)
        task.add_done_callback(self._welcoming.discard)

    async def _greet(self, connection: socket.socket, visit: HttpPeer) -> None:
        tls = None if visit.uid is not None else self._tls()
        patience = HANDSHAKE_SECONDS if tls else None
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._welcome(visit), connection, ssl=tls, ssl_handshake_timeout=patience
            )
        except (OSError, ssl.SSLError):  # no TLS, a wrong certificate, too slow, or left
            self._rejected("handshake")
            self.gone(visit)
            connection.close()
        except asyncio.CancelledError:
            self.gone(visit)
            connection.close()
            raise

    def _exhausted(self, listener: socket.socket, error: OSError) -> None:
        """Without a descriptor nobody can be accepted: make one free, and look again in a moment, not at once."""
        log.warning("cannot accept connections for a moment: %s", error.strerror)
        self._rejected("descriptors")
        self._close_one(self._visits, self._visits.users())
        self._loop.remove_reader(listener.fileno())
        self._loop.call_later(PAUSE_SECONDS, self._accept_again, listener)

    def _accept_again(self, listener: socket.socket) -> None:
        if not self._closed:
            self._loop.add_reader(listener.fileno(), self._accept, listener)

    def _user(self, connection: socket.socket, address: str) -> str:
        user = user_of(None, address)
        return user if user != LOOPBACK else user_of(self._owner(connection), address)
