"""Exits of other processes, through one descriptor for each (pidfd): one system call names those that have exited."""

from __future__ import annotations

import os
import resource
import select
from collections.abc import Collection

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
