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
