"""Processes of this machine: their ancestors, and signals to those of this user."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping

from gpumond.facts.program import ProcessKey
from gpumond.host.machine import find_process, process_start, read_head
from gpumond.top.processes import Ancestor
from gpumond.view.rows import ProcessRow, plain

PROC = "/proc"
MAX_DEPTH = 20
SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGKILL", "SIGSTOP", "SIGCONT")


class Lineages:
    """Ancestors of processes. They are read once for each process."""

    def __init__(self) -> None:
        self._known: dict[ProcessKey, tuple[Ancestor, ...]] = {}

    def of(self, processes: Iterable[ProcessKey]) -> Mapping[ProcessKey, tuple[Ancestor, ...]]:
        """Return the ancestors of each process, the parent first; none of a process of another machine."""
        self._known = {key: self._known[key] if key in self._known else _ancestors(key) for key in processes}
        return self._known


def _ancestors(key: ProcessKey) -> tuple[Ancestor, ...]:
    start = process_start(PROC, key.pid)
    if start is None or start.start_ticks != key.start_ticks:
        return ()
    found: list[Ancestor] = []
    while start is not None and start.parent > 0 and len(found) < MAX_DEPTH:
        found.append(Ancestor(start.parent, _name(start.parent)))
        start = process_start(PROC, start.parent)
    return tuple(found)


def _name(pid: int) -> str:
    try:
        return plain(read_head(f"{PROC}/{pid}/comm").decode(errors="replace").strip(), 40)
    except OSError:
        return "?"


def refusal(row: ProcessRow, local: bool) -> str:
    """Return why a process receives no signal from here; empty if it may.

    ``local``: its daemon may be on this machine.
    """
    found = find_process(row.pid) if local else None
    if found is None or found[0] != row.key[1]:
        return "it does not run on this machine, or not in this PID namespace"
    return "" if found[1] == os.geteuid() else "it is not your program"


def send(row: ProcessRow, local: bool, name: str) -> str:
    """Send a signal to a process and return the result. No other process receives it, even if the pid is reused."""
    try:
        process = os.pidfd_open(row.pid)
    except OSError as error:
        return f"not sent: {error.strerror}"
    try:
        if reason := refusal(row, local):  # of the process that the descriptor refers to
            return f"not sent: {reason}"
        signal.pidfd_send_signal(process, signal.Signals[name])
    except OSError as error:
        return f"not sent: {error.strerror}"
    finally:
        os.close(process)
    return f"{name} sent"
