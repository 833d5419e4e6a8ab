"""Identity of a pid from /proc: start time, command name, owner, state.

Covers vanished pids, pids of another PID namespace (both unknown), reused pids (never mistaken for the previous
process), and command names with any bytes. Does not cover containers, command lines and environments.

Reading the files of each process takes most of the time of a reading with many processes. A process whose exit is
watched is therefore read every ``REREAD_SECONDS``: until it exits, its pid cannot be another process's.
"""

from __future__ import annotations

import os
import pwd
import resource
import select
import time
from collections.abc import Callable, Collection, Iterable, Mapping
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
REREAD_SECONDS = 10


class _Known(NamedTuple):
    """``key``: command name and start of the process. It is read again when it is ``due``, in monotonic seconds."""

    key: bytes
    owner: ProcessOwner
    start: ProcessStart | None
    due: float


class ProcessTable:
    """Identities of the pids that devices list. ``root`` replaces /proc; exits are watched in the real one only."""

    def __init__(self, root: str = "/proc", clock: Callable[[], float] = time.monotonic) -> None:
        self._root, self._clock = root, clock
        self._exits = ExitWatch() if root == "/proc" else None
        self.process_starts: dict[int, ProcessStart] = {}
        """Data of the processes of the last ``read``, from their stat files."""
        self._known: dict[int, _Known] = {}

    def pid_max(self) -> int:
        """Return the largest pid that this kernel assigns."""
        try:
            return int(read_head(f"{self._root}/sys/kernel/pid_max"))
        except (OSError, ValueError):
            return 4194304  # the kernel's own limit, PID_MAX_LIMIT

    def read(self, pids: Iterable[int]) -> Mapping[int, ProcessOwner]:
        """Return the identity of each pid; all other pids are forgotten."""
        now, before = self._clock(), self._known
        for pid in self._exits.exited() if self._exits else ():
            before.pop(pid, None)
        self._known = {
            pid: known if (known := before.get(pid)) and now < known.due else self._look_up(pid, known, now)
            for pid in set(pids)
        }
        if self._exits:
            for pid in before.keys() - self._known.keys():
                self._exits.discard(pid)
        self.process_starts = {pid: known.start for pid, known in self._known.items() if known.start}
        return {pid: known.owner for pid, known in self._known.items()}

    def _look_up(self, pid: int, known: _Known | None, now: float) -> _Known:
        """Read the owner once per start time and name; it changes only with an exec."""
        watched = self._exits is not None and self._exits.add(pid)  # before the files are read
        key, start = self._key(pid)
        # The first interval differs by pid, so that processes are not all read at once.
        due = now + (REREAD_SECONDS if known else 1 + pid % REREAD_SECONDS) if watched and _is_stable(start) else now
        if known is not None and known.key == key:
            return _Known(key, known.owner, known.start if known.start == start else start, due)
        name, _, ticks = key.rpartition(b")")
        try:
            uid = self._uid(pid)
            owner = ProcessOwner(int(ticks), clean(name.decode("utf-8", "replace")), uid, user_name(uid))
        except (OSError, ValueError, IndexError):
            return _Known(b"", UNKNOWN, start, now)
        # The pid may have been reused between the two files.
        return _Known(key, owner, start, due) if self._key(pid)[0] == key else _Known(b"", UNKNOWN, start, now)

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


def _is_stable(start: ProcessStart | None) -> bool:
    """Return True for a process that runs or sleeps. A process in any other state is read at each reading."""
    return start is not None and start.state in ("R", "S", "I")


@cache
def user_name(uid: int) -> str | None:
    """Return the account's name, or None for a uid without one."""
    try:
        return clean(pwd.getpwuid(uid).pw_name)
    except (KeyError, OSError):
        return None


DESCRIPTOR_SHARE = 0.25
"""Maximum share of this process's descriptors that one watch uses; a process may have several watches."""


class ExitWatch:
    """Watch over at most ``limit`` processes. Each exit is reported once, and ends the watch over that process."""

    def __init__(self, limit: int | None = None) -> None:
        self._limit = _descriptors() if limit is None else limit
        self._poll = select.epoll()
        self._descriptors: dict[int, int] = {}
        self._pids: dict[int, int] = {}

    def add(self, pid: int) -> bool:
        """Watch the process that has this pid now. Returns False if that is not possible."""
        if pid in self._descriptors:
            return True
        if len(self._descriptors) >= self._limit:
            return False
        try:
            descriptor = os.pidfd_open(pid)
        except (OSError, AttributeError):  # it has exited, or the kernel, a filter or this Python lacks the call
            return False
        try:
            self._poll.register(descriptor, select.EPOLLIN)
        except OSError:  # the user's limit of epoll watches
            os.close(descriptor)
            return False
        self._descriptors[pid], self._pids[descriptor] = descriptor, pid
        return True

    def exited(self) -> Collection[int]:
        """Return the pids whose process has exited since the last call."""
        ready = self._poll.poll(0, max(1, len(self._pids)))
        pids = [self._pids[descriptor] for descriptor, _ in ready]
        for pid in pids:
            self.discard(pid)
        return pids

    def discard(self, pid: int) -> None:
        descriptor = self._descriptors.pop(pid, None)
        if descriptor is not None:
            del self._pids[descriptor]
            os.close(descriptor)  # removes it from the poll, too


def _descriptors() -> int:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return int(limit * DESCRIPTOR_SHARE) if limit > 0 else 1 << 20
