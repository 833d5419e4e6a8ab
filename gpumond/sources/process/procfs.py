"""Identity of a pid from /proc: start time, command name, owner, state.

Covers vanished pids, pids of another PID namespace (both unknown), reused pids (never mistaken for the previous
process), and command names with any bytes. Does not cover containers, command lines and environments.
"""

from __future__ import annotations

import pwd
from collections.abc import Iterable, Mapping
from functools import cache
from typing import NamedTuple

from gpumond.host.processes import ProcessStart, read_head, start_of
from gpumond.protocol.messages import clean


class ProcessOwner(NamedTuple):
    """Owner of a process; all None if /proc does not have the pid. ``start_ticks`` counts from boot, in USER_HZ."""

    start_ticks: int | None = None
    comm: str | None = None
    uid: int | None = None
    user: str | None = None


UNKNOWN = ProcessOwner()


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
            return int(read_head(f"{self._root}/sys/kernel/pid_max"))
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
            stat = read_head(f"{self._root}/{pid}/stat")
        except OSError:
            return b""
        before, _, after = stat.rpartition(b")")
        fields = after.split(maxsplit=20)
        if len(fields) <= 20:
            return b""
        self.process_starts[pid] = start_of(fields)
        return before.partition(b"(")[2] + b")" + fields[19]

    def _uid(self, pid: int) -> int:
        """Return the effective uid, like SO_PEERCRED; the directory's owner is root for undumpable processes."""
        status = read_head(f"{self._root}/{pid}/status", 4096)
        return int(status.partition(b"\nUid:")[2].split(maxsplit=2)[1])


@cache
def user_name(uid: int) -> str | None:
    """Return the account's name, or None for a uid without one."""
    try:
        return clean(pwd.getpwuid(uid).pw_name)
    except (KeyError, OSError):
        return None
