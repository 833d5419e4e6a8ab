"""Processes of this machine: their ancestors, and signals to those of this user."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping

from gpumond.facts.process import ProcessKey
from gpumond.host.machine import find_process, process_start, read_head, start_of, stat_fields
from gpumond.top.processes import Ancestor
from gpumond.view.rows import HostFacts, ProcessRow, plain

PROC = "/proc"
MAX_DEPTH = 20
VITAL_SECONDS = 1.0
COMMAND_BYTES = 1024
TICKS, PAGE_BYTES = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGKILL", "SIGSTOP", "SIGCONT")


class Lineages:
    """Ancestors of processes. They are read once for each process."""

    def __init__(self) -> None:
        self._known: dict[ProcessKey, tuple[Ancestor, ...]] = {}

    def of(self, processes: Iterable[ProcessKey]) -> Mapping[ProcessKey, tuple[Ancestor, ...]]:
        """Return the ancestors of each process, the parent first; none of a process of another machine."""
        self._known = {key: self._known[key] if key in self._known else _ancestors(key) for key in processes}
        return self._known


class Vitals:
    """Command lines, ages, host memory and processor time of processes, read at most once a second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[ProcessKey, tuple[float, int, HostFacts]] = {}
        """By process: the time of the reading, its processor time in ticks, and what is shown."""

    def of(self, processes: Iterable[ProcessKey]) -> Mapping[ProcessKey, HostFacts]:
        """Return what is known of each process; nothing of one of another machine."""
        now, fresh = self._clock(), {}
        for key in processes:
            before = self._known.get(key)
            found = before if before and now - before[0] < VITAL_SECONDS else _vitals(key, before, now)
            if found:
                fresh[key] = found
        self._known = fresh
        return {key: facts for key, (_, _, facts) in fresh.items()}


def _vitals(
    key: ProcessKey, before: tuple[float, int, HostFacts] | None, now: float
) -> tuple[float, int, HostFacts] | None:
    try:
        fields = stat_fields(read_head(f"{PROC}/{key.pid}/stat"))
        if start_of(fields).start_ticks != key.start_ticks:
            return None
        uptime = float(read_head(f"{PROC}/uptime").split()[0])
        command = before[2].command if before else _command(key.pid)
        spent = int(fields[11]) + int(fields[12])
        resident = int(read_head(f"{PROC}/{key.pid}/statm").split()[1]) * PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return None
    cpu = (spent - before[1]) / TICKS / (now - before[0]) if before else None
    age = uptime - start_of(fields).start_ticks / TICKS
    return now, spent, HostFacts(command, max(0.0, age), resident, cpu)


def _command(pid: int) -> str:
    return plain(
        read_head(f"{PROC}/{pid}/cmdline", COMMAND_BYTES).replace(b"\0", b" ").decode(errors="replace").strip(), 200
    )


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
