"""Identity of a process. No I/O."""

from __future__ import annotations

from typing import NamedTuple

TICKS_PER_SECOND = 100
"""Linux's USER_HZ, the unit of ``start_ticks``, on all architectures that have GPUs."""

MAX_PID = 1 << 22
"""Largest pid of Linux (PID_MAX_LIMIT). A larger number denotes a connection of an agent whose pid is unknown."""

IDLE_SECONDS = 1800.0
"""Time without use of a device after which a process that holds its memory counts as idle."""


class ProcessKey(NamedTuple):
    """Identity of a process: its pid and its start, as pids are reused.

    ``pid`` is above ``MAX_PID`` for an agent in a PID namespace that the daemon cannot see; its start is unknown.
    ``start_ticks`` counts from boot, in USER_HZ; None if it is unknown. Keys are equal if both parts are: a key with
    an unknown start equals no key with a known one. A named tuple, since a tick looks up thousands of keys, and the
    hash of a dataclass takes three times as long.
    """

    pid: int
    start_ticks: int | None

    def may_be(self, other: ProcessKey) -> bool:
        """Return False if the two are known to be different processes: other pids, or other known starts."""
        return self.pid == other.pid and (
            self.start_ticks is None or other.start_ticks is None or self.start_ticks == other.start_ticks
        )


def process_key(pid: int | None, start_ticks: int | None) -> ProcessKey | None:
    """Return the key of a process, or None for a value of a whole device."""
    return None if pid is None else ProcessKey(pid, start_ticks)
