"""Identity of a pid from /proc: start time, command name, owner, state.

Covers vanished pids, pids of another PID namespace (both unknown), reused pids (never mistaken for the previous
process), and command names with any bytes. Does not cover containers, command lines and environments.
"""

from __future__ import annotations

import pwd
from collections.abc import Iterable, Mapping
from functools import cache
from typing import NamedTuple

from gpumond.facts.messages import clean
from gpumond.host.machine import ProcessStart, read_head, start_of


class ProcessOwner(NamedTuple):
    """Owner of a process; all None if /proc does not have the pid. ``start_ticks`` counts from boot, in USER_HZ."""

    start_ticks: int | None = None
    comm: str | None = None
    uid: int | None = None
    user: str | None = None


UNKNOWN = ProcessOwner()


class _Known(NamedTuple):
    """``key``: command name and start of the process."""

    key: bytes
    owner: ProcessOwner
    start: ProcessStart | None


class ProcessTable:
    """Identities of the pids that devices list. ``root`` replaces /proc."""

    def __init__(self, root: str = "/proc") -> None:
        self._root = root
        self._known: dict[int, _Known] = {}

    @property
    def process_starts(self) -> Mapping[int, ProcessStart]:
        """Data of the processes of the last ``read``, from their stat files."""
        return {pid: known.start for pid, known in self._known.items() if known.start}

    def pid_max(self) -> int:
        """Return the largest pid that this kernel assigns."""
        try:
            return int(read_head(f"{self._root}/sys/kernel/pid_max"))
        except (OSError, ValueError):
            return 4194304  # the kernel's own limit, PID_MAX_LIMIT

    def read(self, pids: Iterable[int]) -> Mapping[int, ProcessOwner]:
        """Return the identity of each pid; all other pids are forgotten."""
        self._known = {pid: self._look_up(pid, self._known.get(pid)) for pid in set(pids)}
        return {pid: known.owner for pid, known in self._known.items()}

    def _look_up(self, pid: int, known: _Known | None) -> _Known:
        """Read the owner once per start time and name; it changes only with an exec."""
        key, start = self._key(pid)
        if known is not None and known.key == key:
            return _Known(key, known.owner, start)
        name, _, ticks = key.rpartition(b")")
        try:
            uid = self._uid(pid)
            owner = ProcessOwner(int(ticks), clean(name.decode("utf-8", "replace")), uid, user_name(uid))
        except (OSError, ValueError, IndexError):
            return _Known(b"", UNKNOWN, start)
        # The pid may have been reused between the two files.
        return _Known(key, owner, start) if self._key(pid)[0] == key else _Known(b"", UNKNOWN, start)

    def _key(self, pid: int) -> tuple[bytes, ProcessStart | None]:
        """Return ``comm)start_ticks`` and the start data, or nothing if the process has exited.

        The name may contain parentheses.
        """
        try:
            stat = read_head(f"{self._root}/{pid}/stat")
        except OSError:
            return b"", None
        before, _, after = stat.rpartition(b")")
        fields = after.split(maxsplit=20)
        if len(fields) <= 20:
            return b"", None
        return before.partition(b"(")[2] + b")" + fields[19], start_of(fields)

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
