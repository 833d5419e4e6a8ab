"""Identity of a pid from /proc: start time, command name, owner, state.

Covers vanished pids, pids of another PID namespace (both unknown), reused pids (never mistaken for the previous
process), and command names with any bytes. Does not cover containers, command lines and environments.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterable, Mapping
from functools import cache
from typing import NamedTuple

from gpumond.protocol.messages import clean

STAT_BYTES = 1024
"""Size that contains a stat line up to its 22nd field."""


class ProcessOwner(NamedTuple):
    """Owner of a process; all None if /proc does not have the pid. ``start_ticks`` counts from boot, in USER_HZ."""

    start_ticks: int | None = None
    comm: str | None = None
    uid: int | None = None
    user: str | None = None


UNKNOWN = ProcessOwner()

KERNEL_THREAD = 0x00200000
"""PF_KTHREAD of the kernel's include/linux/sched.h."""


class ProcessStart(NamedTuple):
    """Variable data of a process: ``state`` is the kernel's letter, ``flags`` are the kernel's PF_*.

    ``parent`` and ``session`` are pids, or 0 if they are in another PID namespace.
    """

    start_ticks: int
    state: str
    flags: int
    parent: int
    session: int


def process_start(root: str, pid: int) -> ProcessStart | None:
    """Return the process's data, or None if it does not exist."""
    try:
        return _process_start(_content(f"{root}/{pid}/stat").rpartition(b")")[2].split(maxsplit=20))
    except (OSError, ValueError, IndexError):
        return None


def _process_start(fields: list[bytes]) -> ProcessStart:
    return ProcessStart(int(fields[19]), fields[0].decode("ascii"), int(fields[6]), int(fields[1]), int(fields[3]))


class ProcessTable:
    """Identities of the pids that devices list. ``root`` replaces /proc."""

    def __init__(self, root: str = "/proc") -> None:
        self._root = root
        self.process_starts: dict[int, ProcessStart] = {}
        """Data of the processes of the last ``read``, whose stat files it reads anyway."""
        self._known: dict[int, tuple[bytes, ProcessOwner]] = {}

    def pid_max(self) -> int:
        """Return the largest pid that this kernel assigns."""
        try:
            return int(_content(f"{self._root}/sys/kernel/pid_max"))
        except (OSError, ValueError):
            return 4194304  # the kernel's own limit, PID_MAX_LIMIT

    def read(self, pids: Iterable[int]) -> Mapping[int, ProcessOwner]:
        """Return the identity of each pid; all other pids are forgotten."""
        self.process_starts = {}
        self._known = {pid: self._look_up(pid) for pid in set(pids)}
        return {pid: identity for pid, (_, identity) in self._known.items()}

    def _look_up(self, pid: int) -> tuple[bytes, ProcessOwner]:
        """Read the owner once per start time and name; it changes only with an exec."""
        key = self._key(pid)
        cached = self._known.get(pid)
        if cached is not None and cached[0] == key:
            return cached
        name, _, ticks = key.rpartition(b")")
        try:
            uid = self._uid(pid)
            identity = ProcessOwner(int(ticks), clean(name.decode("utf-8", "replace")), uid, user_name(uid))
        except (OSError, ValueError, IndexError):
            return b"", UNKNOWN
        # The pid may have been reused between the two files.
        return (key, identity) if self._key(pid) == key else (b"", UNKNOWN)

    def _key(self, pid: int) -> bytes:
        """Return ``comm)start_ticks``, or nothing if the process has exited. The name may contain parentheses."""
        try:
            stat = _content(f"{self._root}/{pid}/stat")
        except OSError:
            return b""
        before, _, after = stat.rpartition(b")")
        fields = after.split(maxsplit=20)
        if len(fields) <= 20:
            return b""
        self.process_starts[pid] = _process_start(fields)
        return before.partition(b"(")[2] + b")" + fields[19]

    def _uid(self, pid: int) -> int:
        """Return the effective uid, like SO_PEERCRED; the directory's owner is root for undumpable processes."""
        status = _content(f"{self._root}/{pid}/status", 4096)
        return int(status.partition(b"\nUid:")[2].split(maxsplit=2)[1])


@cache
def user_name(uid: int) -> str | None:
    """Return the account's name, or None for a uid without one."""
    try:
        return clean(pwd.getpwuid(uid).pw_name)
    except (KeyError, OSError):
        return None


def _content(path: str, size: int = STAT_BYTES) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, size)
    finally:
        os.close(descriptor)
