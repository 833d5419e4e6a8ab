"""Processes that have device nodes open, from /proc/PID/fd.

Inspecting every descriptor of every process is too expensive for each reading. A process is inspected when it is new,
when it had a node open the last time, and otherwise at each ``turns``-th reading.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple

from gpumond.sources.process.procfs import KERNEL_THREAD, life

MAX_PROCESSES = 32768
MAX_DESCRIPTORS = 4096
"""Maximum number of descriptors inspected per process."""


class Node(NamedTuple):
    descriptor: str
    path: str


class OpenDeviceNodes:
    """Search for open device nodes. ``prefixes`` are prefixes of their paths; ``root`` replaces /proc.

    After ``read``, ``hidden`` is the number of processes that cannot be inspected, as far as it is known.
    """

    def __init__(self, prefixes: tuple[str, ...], root: str = "/proc", turns: int = 10) -> None:
        self._prefixes, self._root, self._turns = prefixes, root, turns
        self._turn = 0
        self._known: dict[int, tuple[Node, ...]] = {}
        self._hidden: set[int] = set()
        self._all_visible = True

    @property
    def hidden(self) -> int:
        return len(self._hidden) + (not self._all_visible)

    def read(self) -> Mapping[int, tuple[Node, ...]]:
        """Return the open nodes of each process that has any."""
        self._turn = (self._turn + 1) % self._turns
        pids = self._pids()
        self._all_visible = 1 in pids  # otherwise /proc is mounted with hidepid
        self._hidden.intersection_update(pids)
        self._known = {
            pid: self.nodes(pid) if self._due(pid) else self._known[pid] for pid in islice(pids, MAX_PROCESSES)
        }
        return {pid: nodes for pid, nodes in self._known.items() if nodes}

    def nodes(self, pid: int) -> tuple[Node, ...]:
        """Return the open nodes of one process; none if it has exited or cannot be inspected."""
        directory = f"{self._root}/{pid}/fd"
        try:
            with os.scandir(directory) as entries:
                names = [entry.name for entry in islice(entries, MAX_DESCRIPTORS)]
        except PermissionError:
            now = life(self._root, pid)
            if now is not None and not now.flags & KERNEL_THREAD:
                self._hidden.add(pid)
            return ()
        except OSError:
            return ()
        self._hidden.discard(pid)
        return tuple(self._matching(directory, names))

    def _due(self, pid: int) -> bool:
        return bool(self._known.get(pid, True)) or pid % self._turns == self._turn

    def _pids(self) -> list[int]:
        try:
            return [int(name) for name in os.listdir(self._root) if name.isdecimal()]
        except OSError:
            return []

    def _matching(self, directory: str, names: Iterable[str]) -> Iterator[Node]:
        for name in names:
            try:
                path = os.readlink(f"{directory}/{name}")
            except OSError:
                continue  # closed in the meantime
            if path.startswith(self._prefixes):
                yield Node(name, path)
