"""Validation of a driver's values: impossible values are dropped and counted, never exported. Performs no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from gpumond.devices.process.procfs import ProcessIdentity
from gpumond.facts.errors import FaultKind, ReturnCode
from gpumond.facts.messages import MAX_INTEGER, printable_text
from gpumond.facts.snapshot import Fault, ProcessUsage

IMPOSSIBLE: FaultKind = "impossible_value"
"""Kind of the fault for impossible values."""

UNTRUSTED_RATIO = 0.2
UNTRUSTED_LENGTH = 10
"""Length from which a list with a majority of impossible entries is dropped as a whole.

Its layout is then not the expected one, and its plausible entries are coincidences. In a shorter list, each entry is
validated separately.
"""

MAX_DETAILS = 4
"""Number of impossible entries of a list that the fault names."""


class FaultCollector:
    """Faults of one reading: one per device and kind, regardless of the number of values."""

    def __init__(self) -> None:
        self._details: dict[tuple[str | None, FaultKind | ReturnCode], tuple[int, list[str]]] = {}

    def add(self, uuid: str | None, kind: FaultKind | ReturnCode, detail: str, count: int = 1) -> None:
        before, details = self._details.get((uuid, kind), (0, []))
        self._details[uuid, kind] = (before + count, [*details, detail])

    def extend(self, other: FaultCollector) -> None:
        for (uuid, kind), (count, details) in other._details.items():
            self.add(uuid, kind, ", ".join(details), count)

    def __bool__(self) -> bool:
        return bool(self._details)

    def of_source(self, source: str) -> tuple[Fault, ...]:
        """Return the faults. The detail starts with the number of values if there are several, or if they are
        impossible."""
        return tuple(
            Fault(
                source,
                kind,
                uuid,
                printable_text((f"{count}: " if count > 1 or kind == IMPOSSIBLE else "") + ", ".join(details)),
            )
            for (uuid, kind), (count, details) in self._details.items()
        )


class MemoryCounts(NamedTuple):
    size_bytes: int | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None
    reserved_bytes: int | None = None


def valid_memory(faults: FaultCollector, uuid: str, counts: MemoryCounts) -> MemoryCounts:
    size = counts.size_bytes
    if not size:
        return MemoryCounts()  # some drivers return 0 for "not supported"
    if size >= MAX_INTEGER:
        faults.add(uuid, IMPOSSIBLE, f"size_bytes {size}")
        return MemoryCounts()
    impossible_fields = {
        name for name, value in zip(counts._fields, counts, strict=True) if value is not None and value > size
    }
    for name in sorted(impossible_fields):
        faults.add(uuid, IMPOSSIBLE, f"{name} {getattr(counts, name)} of {size}")
    return counts._replace(**dict.fromkeys(impossible_fields))


class ListedProcess(NamedTuple):
    """Entry of a process list of the driver."""

    kind: str
    instance: tuple[int, int]
    pid: int
    used_bytes: int | None


@dataclass(slots=True)
class DriverUsage:
    used_bytes: int | None
    kinds: tuple[str, ...]


def valid_usages(
    faults: FaultCollector, uuid: str, listed: Iterable[ListedProcess], size_bytes: int, pid_max: int
) -> dict[int, DriverUsage] | None:
    """Return the usage per pid. Of several lists the larger count applies; counts of several instances are added.

    ``size_bytes`` is the size of the device. Returns None if the list is not trustworthy.
    """
    merged: dict[tuple[int, tuple[int, int]], DriverUsage] = {}
    impossible: list[str] = []
    entries = rejected = 0
    for kind, instance, pid, used in listed:
        entries += 1
        if not 0 < pid <= pid_max or (used is not None and used > size_bytes):
            rejected += 1
            if rejected <= MAX_DETAILS:
                impossible.append(f"pid {pid}" if used is None else f"pid {pid} with {used} bytes")
            continue
        usage = merged.setdefault((pid, instance), DriverUsage(used, ()))
        if kind not in usage.kinds:
            usage.kinds += (kind,)
        if used is not None:
            usage.used_bytes = max(used, usage.used_bytes or 0)
    if rejected:
        faults.add(uuid, IMPOSSIBLE, ", ".join(impossible), rejected)
    untrusted = entries >= UNTRUSTED_LENGTH and rejected > UNTRUSTED_RATIO * entries
    return None if untrusted else _sum_instances(merged)


def _sum_instances(merged: dict[tuple[int, tuple[int, int]], DriverUsage]) -> dict[int, DriverUsage]:
    by_pid: dict[int, DriverUsage] = {}
    for (pid, _), usage in merged.items():
        total = by_pid.setdefault(pid, usage)
        if total is not usage:
            total.kinds += tuple(kind for kind in usage.kinds if kind not in total.kinds)
            are_known = total.used_bytes is not None and usage.used_bytes is not None
            total.used_bytes = (total.used_bytes or 0) + (usage.used_bytes or 0) if are_known else None
    return by_pid


def process_usages(
    by_pid: Mapping[int, DriverUsage],
    identities: Mapping[int, ProcessIdentity],
    utilization_by_pid: Mapping[int, float],
) -> tuple[ProcessUsage, ...]:
    """Return a device's processes in the order of their pids. ``utilization_by_pid``: their utilization, where it is
    known.
    """
    return tuple(
        _process_usage(pid, usage, identities[pid], utilization_by_pid.get(pid))
        for pid, usage in sorted(by_pid.items())
    )


def _process_usage(
    pid: int, usage: DriverUsage, identity: ProcessIdentity, utilization_ratio: float | None
) -> ProcessUsage:
    return ProcessUsage(
        pid=pid,
        start_ticks=identity.start_ticks,
        used_bytes=usage.used_bytes,
        kinds=usage.kinds,
        comm=identity.comm,
        uid=identity.uid,
        user=identity.user,
        command=identity.command,
        utilization_ratio=utilization_ratio,
        idle_seconds=0.0 if utilization_ratio else None,  # the daemon counts from here
    )
