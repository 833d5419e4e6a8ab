"""The agent's end of the socket: connects when possible, sends as much as the socket accepts, and never waits.

Reports are cumulative, so only the newest is kept while the daemon does not read. A message that was sent in part
is completed first.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections import deque
from collections.abc import Collection
from dataclasses import replace

from gpumond.agent.wakeup import file_identity
from gpumond.facts.errors import ProtocolError
from gpumond.facts.messages import MAX_MESSAGE_BYTES, SERVICE_SOCKET, FlushResult, Message, Report, decode, encode

FIRST_RETRY_SECONDS = 0.1
LAST_RETRY_SECONDS = 10.0
MAX_QUEUED_MESSAGES = 64
MAX_UNREAD_BYTES = 16 * MAX_MESSAGE_BYTES
MESSAGE_RATE = (128, 1 / 16)
"""Number of messages at once, then seconds for each further one. A daemon that exceeds this is disconnected."""


class Transport:
    """One connection at a time. ``now`` is any monotonic clock, in seconds."""

    def __init__(self, accepted_uids: Collection[int] | None = None) -> None:
        self._accepted_uids = accepted_uids
        self._retry_seconds = FIRST_RETRY_SECONDS
        self.next_attempt_at = 0.0
        self._message_rate = RateLimit(*MESSAGE_RATE)
        self.refusals = 0
        """Number of untrusted daemons, and of connections that were closed because of invalid data."""
        self._forget()

    def _forget(self) -> None:
        self._socket: socket.socket | None = None
        self._file_identity: tuple[int, int] | None = None
        self._connected_at = 0.0
        self._unsent = b""
        self._queued_messages: deque[bytes] = deque(maxlen=MAX_QUEUED_MESSAGES)
        self._queued_report = b""
        self._unread = b""

    @property
    def is_connected(self) -> bool:
        return self._socket is not None

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent or self._queued_messages or self._queued_report)

    def fileno(self) -> int:
        return -1 if self._socket is None else self._socket.fileno()

    def connect(self, path: str, now: float) -> bool:
        """Try to connect once, to the daemon of a trusted user only."""
        connection: socket.socket | None = None
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.setblocking(False)  # connect() would wait as long as the backlog is full
            connection.connect(path)
            _, uid, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if uid not in (trusted_uids() if self._accepted_uids is None else self._accepted_uids):
                self.refusals += 1
                raise PermissionError(f"the daemon at {path} runs as uid {uid}")
        except (OSError, AttributeError):  # no SO_PEERCRED: not Linux
            if connection is not None:
                connection.close()
            self._retry_later(now)
            return False
        self._socket, self._file_identity = connection, file_identity(connection.fileno())
        self._connected_at = now
        return True

    def enqueue(self, message: Message) -> None:
        """Queue a message; of several reports only the newest."""
        if isinstance(message, Report):
            self._queued_report = _encode_within_limit(message)
        else:
            self._queued_messages.append(_encode_within_limit(message))

    def send_pending(self, now: float) -> None:
        """Send as much as the socket accepts."""
        connection = self._valid_socket()
        while connection is not None:
            if not self._unsent:
                if self._queued_messages:
                    self._unsent = self._queued_messages.popleft()
                elif self._queued_report:
                    self._unsent, self._queued_report = self._queued_report, b""
                else:
                    return
            try:
                sent = connection.send(self._unsent, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError:
                self.close(now)
                return
            self._unsent = self._unsent[sent:]

    def receive(self, now: float) -> list[Message]:
        """Return all received messages. Invalid data and the daemon's end close the connection."""
        connection = self._valid_socket()
        try:
            while connection is not None and len(self._unread) < MAX_UNREAD_BYTES:
                chunk = connection.recv(MAX_MESSAGE_BYTES)
                if not chunk:
                    raise ConnectionResetError
                self._unread += chunk
        except BlockingIOError:
            pass
        except OSError:
            self.close(now)
            return []
        *lines, self._unread = self._unread.split(b"\n")
        try:
            if max(map(len, [*lines, self._unread])) >= MAX_MESSAGE_BYTES:
                raise ProtocolError("size", "message too long")
            return [self._decoded(line, now) for line in lines]
        except ProtocolError:
            self.refusals += 1
            self.close(now)
            return []

    def _decoded(self, line: bytes, now: float) -> Message:
        if not self._message_rate.allows(now):
            raise ProtocolError("rate", "too many messages")
        return decode(line)

    def close(self, now: float) -> None:
        connection = self._valid_socket()
        if connection is not None:
            connection.close()
        if now - self._connected_at > LAST_RETRY_SECONDS:
            self._retry_seconds = FIRST_RETRY_SECONDS
        self._forget()
        self._retry_later(now)

    def reset(self) -> None:
        """Close the connection and permit the next at once; in a forked child, close the child's copy only."""
        self.close(0.0)
        self._retry_seconds = FIRST_RETRY_SECONDS
        self.next_attempt_at = 0.0

    def _retry_later(self, now: float) -> None:
        # Not from random: that would change the program's seeded sequence.
        jitter = 0.5 + os.urandom(1)[0] / 256
        self.next_attempt_at = now + self._retry_seconds * jitter
        self._retry_seconds = min(2 * self._retry_seconds, LAST_RETRY_SECONDS)

    def _valid_socket(self) -> socket.socket | None:
        """Return the socket; None if the program has closed its descriptor, which may be another file now."""
        if self._socket is not None and file_identity(self._socket.fileno()) != self._file_identity:
            self._socket.detach()
            self._forget()
        return self._socket


def _encode_within_limit(message: Message) -> bytes:
    """Encode a message. One that is too long loses scopes, out-of-memory snapshots and then pools."""
    encoded = encode(message)
    while len(encoded) > MAX_MESSAGE_BYTES and isinstance(message, (Report, FlushResult)):
        program = message.program if isinstance(message, Report) else None
        if program is not None and isinstance(message, Report) and (program.scopes or program.ooms):
            scopes, ooms = program.scopes[: len(program.scopes) // 2], program.ooms[1:]
            message = replace(message, program=replace(program, scopes=scopes, ooms=ooms))
        else:
            message = replace(message, pools=message.pools[: len(message.pools) // 2])  # type: ignore[arg-type]  # either kind of pools
        encoded = encode(message)
    return encoded


SERVICE_DIRECTORY = os.path.dirname(SERVICE_SOCKET)
OVERFLOW_UID = 65534
"""Represents every user that a user namespace does not know."""
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def trusted_uids(directory: str = SERVICE_DIRECTORY) -> frozenset[int]:
    """Return root, the program's own user, and the user that root has given the service's directory to."""
    uids = {0, os.geteuid()}
    try:
        uids.add(service_uid(directory))
    except OSError:
        pass
    return frozenset(uids)


def service_uid(directory: str = SERVICE_DIRECTORY) -> int:
    """Return the uid of the service's directory, if only root can have set it. Raises OSError with the reason."""
    path = directory
    while path != os.path.dirname(path):
        path = os.path.dirname(path)
        parent = os.lstat(path)
        if not stat.S_ISDIR(parent.st_mode) or parent.st_uid != 0 or parent.st_mode & OTHERS_WRITE:
            raise PermissionError(f"{path} isn't a directory that only root can change")
    status = os.lstat(directory)
    if not stat.S_ISDIR(status.st_mode) or status.st_mode & OTHERS_WRITE:
        raise PermissionError(f"{directory} isn't a directory that only its user can change")
    if status.st_uid == OVERFLOW_UID:
        raise PermissionError(f"{directory} belongs to a user that is unknown in this user namespace")
    return status.st_uid


class RateLimit:
    """A token bucket: ``burst`` at once, then one every ``interval_seconds``. ``now`` is any monotonic clock."""

    def __init__(self, burst: int, interval_seconds: float) -> None:
        self._burst, self._interval_seconds = burst, interval_seconds
        self._tokens, self._filled_at = float(burst), float("-inf")

    def allows(self, now: float) -> bool:
        """Return whether one more is within the rate; if so, count it."""
        self._tokens = min(self._burst, self._tokens + (now - self._filled_at) / self._interval_seconds)
        self._filled_at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True
