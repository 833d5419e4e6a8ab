"""This machine: its name, its processes, its free memory, and the shares of this process's file descriptors."""

from __future__ import annotations

import gc
import os
import re
import resource
import socket
import time
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from gpumond.facts.program import ProcessKey

MACHINE_NAME = os.environ.get("NODE_NAME") or socket.gethostname()
"""In a pod, the name of its node: there, the kernel returns the pod's name."""


BOOTED_AT = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
"""Unix time from which the kernel counts the starts of processes."""

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")

MAX_TEXT_BYTES = 65536

STAT_BYTES = 1024
"""Size that contains a stat line up to its 22nd field."""

KERNEL_THREAD_FLAG = 0x00200000
"""PF_KTHREAD of the kernel's include/linux/sched.h."""

MAX_ANCESTORS = 64

ENDED_STATES = ("Z", "X")

INITIAL_PID_NAMESPACE = 0xEFFFFFFC
"""Inode number of the host's PID namespace (include/linux/proc_ns.h)."""


class ProcessStat(NamedTuple):
    """Fields of a process's stat file: ``state`` is the kernel's letter, ``flags`` are the kernel's PF_*.

    ``start_ticks`` counts from boot, in USER_HZ. ``parent`` and ``session`` are pids, or 0 if they are in another PID
    namespace.
    """

    start_ticks: int
    state: str
    flags: int
    parent: int
    session: int


def read_process_stat(proc: str, pid: int) -> ProcessStat | None:
    """Return the process's data, or None if it does not exist."""
    try:
        return parse_process_stat(stat_fields(read_head(f"{proc}/{pid}/stat")))
    except (OSError, ValueError, IndexError):
        return None


def read_start_ticks(pid: int, proc: str = "/proc") -> int | None:
    """Return the start of a process, or None if it does not exist."""
    start = read_process_stat(proc, pid)
    return None if start is None else start.start_ticks


def started_at(process: ProcessKey) -> float | None:
    """Return the Unix time of the start of a process; None if it is unknown."""
    ticks = process.start_ticks
    return None if ticks is None else round(BOOTED_AT + ticks / TICKS_PER_SECOND, 2)


def find_process(pid: int, proc: str = "/proc") -> tuple[ProcessKey, int] | None:
    """Return a process and the uid of its user, or None if it does not exist or has ended."""
    start = read_process_stat(proc, pid)
    try:
        uid = os.stat(f"{proc}/{pid}").st_uid
    except OSError:
        return None
    return None if start is None or start.state in ENDED_STATES else (ProcessKey(pid, start.start_ticks), uid)


def has_ended(process: ProcessKey) -> bool:
    """Return whether a process has ended; False if that is unknown, as its start is."""
    current = find_process(process.pid)
    return process.start_ticks is not None and (current is None or current[0] != process)


def is_descendant(pid: int, ancestors: Collection[int], proc: str = "/proc") -> bool:
    """Return whether a process, one of its parents or one of theirs is among ``ancestors``."""
    for _ in range(MAX_ANCESTORS):
        if pid in ancestors:
            return True
        start = read_process_stat(proc, pid)
        if start is None or start.parent <= 1:
            return False
        pid = start.parent
    return False


def is_signal_pending(pid: int, signal_number: int, proc: str = "/proc") -> bool:
    """Return whether a signal waits for a process that blocks it."""
    masks = re.findall(r"^S[ih][gd]Pnd:\s*([0-9a-f]+)$", read_or_empty(f"{proc}/{pid}/status"), re.MULTILINE)
    return any(int(pending, 16) >> (signal_number - 1) & 1 for pending in masks)


def stat_fields(stat: bytes) -> list[bytes]:
    """Split a stat line from its third field on. The second, the name, may contain spaces and parentheses."""
    return stat.rpartition(b")")[2].split(maxsplit=20)


def parse_process_stat(fields: list[bytes]) -> ProcessStat:
    """Parse the fields of a stat line. Raises ValueError or IndexError if it is incomplete."""
    return ProcessStat(int(fields[19]), fields[0].decode("ascii"), int(fields[6]), int(fields[1]), int(fields[3]))


def read_or_empty(path: str) -> str:
    """Return a text file of the kernel, such as one of /proc; empty if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(MAX_TEXT_BYTES)
    except OSError:
        return ""


def read_head(path: str, size: int = STAT_BYTES) -> bytes:
    """Return the first bytes of a file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, size)
    finally:
        os.close(descriptor)


def in_private_pid_namespace(proc: str = "/proc") -> bool | None:
    """Return True if this process is in a PID namespace other than the host's; None if that is unknown."""
    try:
        return os.stat(f"{proc}/self/ns/pid").st_ino != INITIAL_PID_NAMESPACE
    except OSError:
        return None


DESCRIPTOR_LIMIT = 16384
OTHER_DESCRIPTORS = 64
"""Descriptors for the store, the driver process, receivers, logs, and connections that are being closed."""
MAX_CONNECTIONS = 1024
RESERVED_CONNECTIONS = 16
"""Additional connections, reserved for /metrics and probes."""


GC_THRESHOLD = 50_000
"""Threshold of the garbage collection. A frame of 1000 programs has 16,000 objects, none of them in a cycle."""


def reduce_garbage_collection() -> None:
    """Exclude what exists from garbage collections, and make them rare: a full one stops the program for 40 ms."""
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)


def raise_descriptor_limit() -> None:
    """Raise RLIMIT_NOFILE to at most DESCRIPTOR_LIMIT, within the hard limit; many systems start programs with 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = DESCRIPTOR_LIMIT if hard == resource.RLIM_INFINITY else min(DESCRIPTOR_LIMIT, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


def max_http_connections(descriptor_limit: int | None = None) -> int:
    """Return the limit of HTTP connections: a quarter of what OTHER_DESCRIPTORS leaves, at most MAX_CONNECTIONS."""
    descriptor_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if descriptor_limit is None else descriptor_limit
    if descriptor_limit < 0:
        return MAX_CONNECTIONS
    return max(8, min(MAX_CONNECTIONS, (descriptor_limit - OTHER_DESCRIPTORS) // 4))


def reserved_descriptors() -> int:
    """Return the number of descriptors that are not available to agent connections."""
    return OTHER_DESCRIPTORS + max_http_connections() + RESERVED_CONNECTIONS


def max_http_connections_per_user(connections: int) -> int:
    """Return the limit of HTTP connections per user; all clients behind a proxy or tunnel count as one user."""
    return max(1, connections * 3 // 4)


def available_bytes(pids: Iterable[int], proc: str = "/proc", cgroups: str = "/sys/fs/cgroup") -> int | None:
    """Return the smallest of MemAvailable and the free bytes of each cgroup above the processes; None if unknown."""
    match = re.search(r"^MemAvailable:\s+(\d+)", read_or_empty(f"{proc}/meminfo"), re.MULTILINE)
    sizes = [int(match[1]) << 10] if match else []
    for pid in pids:
        sizes += _available_in_cgroups(read_or_empty(f"{proc}/{pid}/cgroup"), cgroups)
    return min(sizes, default=None)


def _available_in_cgroups(text: str, cgroups: str) -> Iterator[int]:
    """Yield limit minus use of a process's memory cgroup and of all above it, in version 1 and 2."""
    for line in text.splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0":
            root, limit, current = cgroups, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit, current = f"{cgroups}/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        while path.strip("/"):
            limit_text = read_or_empty(f"{root}{path}/{limit}").strip()
            used_text = read_or_empty(f"{root}{path}/{current}").strip()
            if limit_text.isdigit() and used_text.isdigit():
                yield max(0, int(limit_text) - int(used_text) + _file_cache_bytes(f"{root}{path}/memory.stat"))
            path = path.rpartition("/")[0]


def _file_cache_bytes(path: str) -> int:
    """Return the bytes of files in memory, which the kernel drops before the limit applies."""
    return sum(int(size) for size in re.findall(r"^(?:in)?active_file (\d+)$", read_or_empty(path), re.MULTILINE))
