"""Which processes have device nodes open, from /proc/PID/fd.

To look at every descriptor of every process costs too much for each reading, so a process is looked at when
it is new, when it had a node open the last time, and else at each ``turns``-th reading.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple

from gpumond.sources.process.procfs import KERNEL_THREAD, life

MAX_PROCESSES = 32768
MAX_DESCRIPTORS = 4096
"""More of a process are not looked at."""


class Node(NamedTuple):
    descriptor: str
    path: str


class OpenDeviceNodes:
    """``prefixes`` are those of the nodes' paths; ``root`` is a directory with the shape of /proc.

    After ``read``, ``hidden`` is the number of processes that may not be looked into, as far as is known.
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
        """The open nodes of each process that has some."""
        self._turn = (self._turn + 1) % self._turns
        pids = self._pids()
        self._all_visible = 1 in pids  # else /proc is mounted with hidepid
        self._hidden.intersection_update(pids)
        self._known = {
            pid: self.nodes(pid) if self._due(pid) else self._known[pid] for pid in islice(pids, MAX_PROCESSES)
        }
        return {pid: nodes for pid, nodes in self._known.items() if nodes}

    def nodes(self, pid: int) -> tuple[Node, ...]:
        """The open nodes of one process; none if it is gone or may not be looked into."""
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
                continue  # closed meanwhile
            if path.startswith(self._prefixes):
                yield Node(name, path)
