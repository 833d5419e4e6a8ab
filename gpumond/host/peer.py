"""Identity of a Unix socket's peer, as the kernel states it, and the person who owns a uid."""

from __future__ import annotations

import itertools
import os
import re
import select
import socket
import struct
import time
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpumond.facts.program import MAX_PID, HasProcessKey
from gpumond.host.files import read_text
from gpumond.host.machine import read_start_ticks

_CREDENTIALS = struct.Struct("3i")
SO_PEERPIDFD = 77
CREDENTIALS_SPACE = socket.CMSG_SPACE(_CREDENTIALS.size)
NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST = 4, 20, 1
ALL_STATES = 0xFFFFFFFF
_NETLINK_HEADER = struct.Struct("=IHHII")
_DIAG_REQUEST = struct.Struct("=BBBBI")
_SOCKET_ID = struct.Struct("!HH16s16sI8s")
_UID_AND_INODE = struct.Struct("=II")
OWNER_OFFSET = 64
"""Offset of uid and inode in struct inet_diag_msg (linux/inet_diag.h)."""
LOOKUP_SECONDS = 0.5
"""Time after which a connection whose other end the kernel doesn't find comes from another machine."""
_connection_numbers = itertools.count(MAX_PID + 1 + int.from_bytes(os.urandom(4), "big") % (1 << 30))
"""Numbers of connections, which remain below 2**31."""


@dataclass(frozen=True, slots=True)
class PeerIdentity(HasProcessKey):
    """A process and its user, as the kernel states them.

    A process that is not visible here has the number of its connection as ``pid``, and no ``start_ticks``.
    """

    pid: int
    start_ticks: int | None
    uid: int


def identify_peer(peer: socket.socket, pidfd: int | None) -> PeerIdentity | None:
    """Return the peer's identity, or None if its process has exited or is not visible in /proc."""
    pid, uid, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    start = read_start_ticks(pid) if pid else None
    if (pid and start is None) or (pidfd is not None and has_exited(pidfd)):
        return None
    return PeerIdentity(pid or next(_connection_numbers), start, uid)


def peer_uid(peer: socket.socket) -> int:
    """Return the uid of the peer at the time of connect()."""
    uid: int = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1]
    return uid


def listener_uid(connection: socket.socket, timeout_seconds: float) -> int | None:
    """Return the uid of the server of a local TCP connection, or None if the kernel does not report it.

    The connection has no owner before the server has accepted it. Raises TimeoutError if it has none after
    ``timeout_seconds``.
    """
    started = time.monotonic()
    deadline, lookup_deadline = started + timeout_seconds, started + min(timeout_seconds, LOOKUP_SECONDS)
    while True:
        end, now = _remote_end(connection), time.monotonic()
        if end is not None and end[1]:
            return end[0]
        if end is None and now > lookup_deadline:
            return None
        if now > deadline:
            raise TimeoutError
        time.sleep(0.005)


def loopback_uid(connection: socket.socket) -> int | None:
    """Return the uid that owns the other end of a local TCP connection, or None if the kernel does not report it."""
    end = _remote_end(connection)
    return end[0] if end is not None and end[1] else None


def _remote_end(connection: socket.socket) -> tuple[int, int] | None:
    """Return uid and inode of the other end of a local TCP connection, or None if the kernel does not report it.

    A socket that its program has closed, or not accepted yet, has no inode, and is reported as root's. Requests that
    one socket from the kernel (sock_diag(7)), which takes 30 us regardless of the number of sockets.
    """
    try:
        peer, local = connection.getpeername(), connection.getsockname()
    except OSError:
        return None  # the peer has disconnected
    addresses = (socket.inet_pton(connection.family, address[0]).ljust(16, b"\0") for address in (peer, local))
    socket_id = _SOCKET_ID.pack(peer[1], local[1], *addresses, 0, b"\xff" * 8)
    request = _DIAG_REQUEST.pack(connection.family, socket.IPPROTO_TCP, 0, 0, ALL_STATES) + socket_id
    header = _NETLINK_HEADER.pack(_NETLINK_HEADER.size + len(request), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 0, 0)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, NETLINK_SOCK_DIAG) as kernel:
            kernel.settimeout(0.1)
            kernel.send(header + request)
            answer = kernel.recv(4096)
    except OSError:
        return None
    if _NETLINK_HEADER.unpack_from(answer)[1] != SOCK_DIAG_BY_FAMILY:
        return None
    uid, inode = _UID_AND_INODE.unpack_from(answer, _NETLINK_HEADER.size + OWNER_OFFSET)
    return int(uid), int(inode)


def peer_pidfd(peer: socket.socket) -> int | None:
    """Return a pidfd of the peer's process, or None if the kernel provides none."""
    try:
        pidfd = peer.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError:
        return None
    os.set_inheritable(pidfd, False)
    return pidfd


def has_exited(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def sender_pid(ancillary: list[tuple[int, int, bytes]]) -> int | None:
    """Return the pid that wrote a message, from its SCM_CREDENTIALS, or None if it is absent."""
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            pid: int = _CREDENTIALS.unpack_from(data)[0]
            return pid or None
    return None


FIRST_PERSON_UID = 1000
"""Lower uids are system accounts. Their ranges belong to the containers of a service, not to a person."""
UIDS_PER_CONTAINER = 65536
"""Size of the block of uids of one container. Each block of a system account's range counts as one user."""
CHECK_SECONDS = 1.0

UidRange = tuple[int, int, int | None]
"""Start and end of a range, and the person that owns it; None for a system account or an unknown name."""


class SubordinateUids:
    """The ranges of ``subuid``, which is read again when it changes. ``passwd`` has the uids of the owners' names."""

    def __init__(self, subuid: Path = Path("/etc/subuid"), passwd: Path = Path("/etc/passwd")) -> None:
        self._subuid, self._passwd = subuid, passwd
        self._version: tuple[int, int, int] | None = None
        self._check_at = float("-inf")
        self._ranges: tuple[list[int], list[UidRange]] = [], []
        """The starts of the ranges, and the ranges; replaced as a whole, since several threads use them."""

    def person_uid(self, uid: int) -> int:
        """Return the uid of the person who owns this uid, or the first uid of its block; ``uid`` without a range."""
        if (now := time.monotonic()) >= self._check_at:
            self._check_at = now + CHECK_SECONDS
            self._refresh()
        starts, ranges = self._ranges
        index = bisect_right(starts, uid) - 1
        if index < 0:
            return uid
        start, end, person = ranges[index]
        if uid >= end:
            return uid
        return start + (uid - start) // UIDS_PER_CONTAINER * UIDS_PER_CONTAINER if person is None else person

    def _refresh(self) -> None:
        try:
            status = os.stat(self._subuid)
            version = status.st_mtime_ns, status.st_size, status.st_ino
            if version == self._version:
                return
            ranges = sorted(self._read(), key=lambda each: each[:2])
        except (OSError, UnicodeDecodeError):
            version, ranges = None, []
        self._version, self._ranges = version, ([start for start, _, _ in ranges], ranges)

    def _read(self) -> Iterator[UidRange]:
        lines = [line.split(":") for line in read_text(self._subuid).splitlines()]
        accounts = (line.split(":") for line in read_text(self._passwd).splitlines())
        uids = {fields[0]: fields[2] for fields in accounts if len(fields) > 2}
        for user, start, count in (line for line in lines if len(line) == 3):
            uid = user if user.isdecimal() else uids.get(user, "")
            if start.isdecimal() and count.isdecimal():
                person = int(uid) if uid.isdecimal() and int(uid) >= FIRST_PERSON_UID else None
                yield int(start), int(start) + int(count), person


_uids = SubordinateUids()


def person_uid(uid: int) -> int:
    """Return the uid of the person who owns this uid by ``/etc/subuid``, or ``uid``."""
    return _uids.person_uid(uid)


CALLER_NAME = re.compile(r"(uid:([0-9]+)|token(?::[A-Za-z0-9._-]+)?)(?:/session:[0-9a-f]+)*(?:@.*)?")
"""A caller's name, with the sessions and the place from which it sends requests, as in `token:ci@10.0.0.7`."""


def rate_limit_name(name: str) -> str:
    """Return the name under which a caller is counted, wherever the requests are from: that of the person for
    ``uid:N``, that of the token, else the name itself."""
    match = CALLER_NAME.fullmatch(name)
    if match is None:
        return name
    return match[1] if match[2] is None else f"uid:{person_uid(int(match[2]))}"
