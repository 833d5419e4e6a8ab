"""Kernel-verified identity of a unix socket's peer.

SO_PEERCRED gives pid and uid at the time of connect(), in this process's PID namespace (pid 0 if the peer is not
visible there). The pid may have been reused before /proc is read, so the read takes place between two checks of a pidfd
if the kernel provides one for sockets (6.5). A peer that is not visible is identified by its connection, which has a
number above ``MAX_PID`` in place of the pid, and by its uid. No number is used twice, not even after a restart, since
the first one is random.
"""

from __future__ import annotations

import itertools
import os
import select
import socket
import struct
import time
from dataclasses import dataclass

from gpumond.host.processes import start_ticks
from gpumond.model.process import MAX_PID, ProcessKey

_CREDENTIALS = struct.Struct("3i")
SO_PEERPIDFD = 77
CREDENTIALS_SPACE = socket.CMSG_SPACE(_CREDENTIALS.size)
NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST = 4, 20, 1
ALL_STATES = 0xFFFFFFFF
_NETLINK_HEADER = struct.Struct("=IHHII")
_DIAG_REQUEST = struct.Struct("=BBBBI")
_SOCKET_ID = struct.Struct("!HH16s16sI8s")
_OWNER = struct.Struct("=II")
OWNER_OFFSET = 64
"""Offset of uid and inode in struct inet_diag_msg (linux/inet_diag.h)."""
UNKNOWN_SECONDS = 0.5
"""Time after which a connection whose other end the kernel does not find is not of this machine."""
_connection_numbers = itertools.count(MAX_PID + 1 + int.from_bytes(os.urandom(4), "big") % (1 << 30))
"""Numbers of connections, which remain below 2**31."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A process and its user, as the kernel states them.

    A process that is not visible here has the number of its connection as ``pid``, and no ``start_ticks``.
    """

    pid: int
    start_ticks: int | None
    uid: int

    @property
    def process(self) -> ProcessKey:
        return ProcessKey(self.pid, self.start_ticks)


def identify(peer: socket.socket, pidfd: int | None, proc: str = "/proc") -> Identity | None:
    """Return the peer's identity, or None if its process has exited or is not visible in ``proc``."""
    pid, uid, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    start = start_ticks(pid, proc) if pid else None
    if (pid and start is None) or (pidfd is not None and ended(pidfd)):
        return None
    return Identity(pid or next(_connection_numbers), start, uid)


def peer_uid(peer: socket.socket) -> int:
    """Return the uid of the peer at the time of connect()."""
    uid: int = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1]
    return uid


def listener_uid(connection: socket.socket, seconds: float) -> int | None:
    """Return the uid of the server of a local TCP connection, or None if the kernel does not report it.

    The connection has no owner before the server has accepted it, which may take ``seconds``.
    """
    until, known_until = time.monotonic() + seconds, time.monotonic() + min(seconds, UNKNOWN_SECONDS)
    while True:
        owner, now = _owner(connection), time.monotonic()
        if owner is not None and owner[1]:
            return owner[0]
        if now > until or (owner is None and now > known_until):
            return None
        time.sleep(0.005)


def loopback_uid(connection: socket.socket) -> int | None:
    """Return the uid that owns the other end of a local TCP connection, or None if the kernel does not report it."""
    owner = _owner(connection)
    return owner[0] if owner is not None and owner[1] else None


def _owner(connection: socket.socket) -> tuple[int, int] | None:
    """Return uid and inode of the other end of a local TCP connection, or None if the kernel does not report it.

    A socket that its program has closed, or not accepted yet, has no inode, and is reported as root's. Requests that
    one socket from the kernel (sock_diag(7)), which takes 30 us regardless of the number of sockets.
    """
    try:
        peer, own = connection.getpeername(), connection.getsockname()
    except OSError:
        return None  # the peer has disconnected
    addresses = (socket.inet_pton(connection.family, address[0]).ljust(16, b"\0") for address in (peer, own))
    sought = _SOCKET_ID.pack(peer[1], own[1], *addresses, 0, b"\xff" * 8)
    request = _DIAG_REQUEST.pack(connection.family, socket.IPPROTO_TCP, 0, 0, ALL_STATES) + sought
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
    uid, inode = _OWNER.unpack_from(answer, _NETLINK_HEADER.size + OWNER_OFFSET)
    return int(uid), int(inode)


def peer_pidfd(peer: socket.socket) -> int | None:
    """Return a pidfd of the peer's process, or None if the kernel provides none."""
    try:
        pidfd = peer.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError:
        return None
    os.set_inheritable(pidfd, False)
    return pidfd


def ended(pidfd: int) -> bool:
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
