"""Who is at the other end of a unix socket, according to the kernel and to nobody else.

SO_PEERCRED gives pid and uid at the time of connect(), in this process's PID namespace (pid 0 if it is
not visible there). Between that and a look into /proc the pid may have been given to another process,
so the look is taken between two checks of a pidfd where the kernel has them for sockets (6.5).
"""

from __future__ import annotations

import os
import select
import socket
import struct
from dataclasses import dataclass

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
"""Of uid and inode in struct inet_diag_msg (linux/inet_diag.h)."""
INITIAL_PID_NAMESPACE = 0xEFFFFFFC
"""Inode of the host's PID namespace (include/linux/proc_ns.h)."""


@dataclass(frozen=True, slots=True)
class Identity:
    pid: int
    start_ticks: int
    uid: int


def identify(peer: socket.socket, pidfd: int | None, proc: str = "/proc") -> Identity | None:
    """The peer's identity; None if its process is gone or cannot be seen from here."""
    pid, uid, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    start = start_ticks(pid, proc) if pid > 0 else None
    if start is None or (pidfd is not None and ended(pidfd)):
        return None
    return Identity(pid, start, uid)


def peer_uid(peer: socket.socket) -> int:
    """The user that connected, as the kernel had it then."""
    uid: int = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1]
    return uid


def loopback_uid(connection: socket.socket) -> int | None:
    """The user whose socket is the other end of a TCP connection of this machine; None where the kernel does not tell.

    Asks the kernel for that one socket (sock_diag(7)), which takes 30 us however many sockets there are.
    """
    try:
        peer, own = connection.getpeername(), connection.getsockname()
    except OSError:
        return None  # it has left
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
    return int(uid) if inode else None  # a socket that its program has closed is nobody's, and counts as root's


def start_ticks(pid: int, proc: str = "/proc") -> int | None:
    """Field 22 of /proc/PID/stat: clock ticks from boot to the process's start."""
    try:
        with open(f"{proc}/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
        return int(fields[19])
    except (OSError, IndexError, ValueError):
        return None


def in_private_pid_namespace(proc: str = "/proc") -> bool | None:
    """Whether this process has pids of its own, in which a driver's pids mean nothing; None if that cannot be told."""
    try:
        return os.stat(f"{proc}/self/ns/pid").st_ino != INITIAL_PID_NAMESPACE
    except OSError:
        return None


def peer_pidfd(peer: socket.socket) -> int | None:
    """A descriptor of the peer's process; None where the kernel gives none for it."""
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
    """The pid that wrote a message, from its SCM_CREDENTIALS; None if the kernel named none."""
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            pid: int = _CREDENTIALS.unpack_from(data)[0]
            return pid or None
    return None
