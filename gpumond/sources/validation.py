"""A driver's answers, checked: what cannot be true is dropped and counted, never shown. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from gpumond.errors import FaultKind, ReturnCode
from gpumond.model.snapshot import Fault
from gpumond.protocol.messages import MAX_INTEGER, clean

IMPOSSIBLE: FaultKind = "impossible_value"
"""The kind of their fault."""

UNTRUSTED_SHARE = 0.2
UNTRUSTED_LENGTH = 10
"""A list of at least that length with more impossible entries than that is dropped whole: its layout is not the
expected one, and what looks possible in it is chance. In a shorter one each entry is judged by itself."""

SHOWN = 4
"""So many impossible entries of a list are named in the fault."""


class Tally:
    """The faults of one reading: one per device and kind, however many answers it concerns."""

    def __init__(self) -> None:
        self._said: dict[tuple[str | None, FaultKind | ReturnCode], tuple[int, list[str]]] = {}

    def add(self, uuid: str | None, kind: FaultKind | ReturnCode, detail: str, count: int = 1) -> None:
        before, details = self._said.get((uuid, kind), (0, []))
        self._said[uuid, kind] = (before + count, [*details, detail])

    def extend(self, other: Tally) -> None:
        for (uuid, kind), (count, details) in other._said.items():
            self.add(uuid, kind, ", ".join(details), count)

    def __bool__(self) -> bool:
        return bool(self._said)

    def faults(self, source: str) -> tuple[Fault, ...]:
        """The detail begins with how many answers it concerns, if several or impossible ones."""
        return tuple(
            Fault(
                source,
                kind,
                uuid,
                clean((f"{count}: " if count > 1 or kind == IMPOSSIBLE else "") + ", ".join(details)),
            )
            for (uuid, kind), (count, details) in self._said.items()
        )


class MemoryCounts(NamedTuple):
    size_bytes: int | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None
    reserved_bytes: int | None = None


def memory(tally: Tally, uuid: str, said: MemoryCounts) -> MemoryCounts:
    size = said.size_bytes
    if not size:
        return MemoryCounts()  # some drivers say 0 where they mean "not supported"
    if size >= MAX_INTEGER:
        tally.add(uuid, IMPOSSIBLE, f"size_bytes {size}")
        return MemoryCounts()
    wrong = {name for name, value in zip(said._fields, said, strict=True) if value is not None and value > size}
    for name in sorted(wrong):
        tally.add(uuid, IMPOSSIBLE, f"{name} {getattr(said, name)} of {size}")
    return said._replace(**dict.fromkeys(wrong))


class Listed(NamedTuple):
    """One entry of one of the driver's process lists."""

    kind: str
    instance: tuple[int, int]
    pid: int
    used_bytes: int | None


@dataclass(slots=True)
class Usage:
    used_bytes: int | None
    kinds: tuple[str, ...]


def usages(tally: Tally, uuid: str, listed: Iterable[Listed], limit: int, pid_max: int) -> dict[int, Usage] | None:
    """Per pid. The same process may be in several lists (the larger count holds) and instances (counts add up).

    ``limit`` is the device's size. None if the list is not to be trusted.
    """
    merged: dict[tuple[int, tuple[int, int]], Usage] = {}
    impossible: list[str] = []
    entries = rejected = 0
    for kind, instance, pid, used in listed:
        entries += 1
        if not 0 < pid <= pid_max or (used is not None and used > limit):
            rejected += 1
            if rejected <= SHOWN:
                impossible.append(f"pid {pid} with {used} bytes")
            continue
        usage = merged.setdefault((pid, instance), Usage(used, ()))
        if kind not in usage.kinds:
            usage.kinds += (kind,)
        if used is not None:
            usage.used_bytes = max(used, usage.used_bytes or 0)
    if rejected:
        tally.add(uuid, IMPOSSIBLE, ", ".join(impossible), rejected)
    untrusted = entries >= UNTRUSTED_LENGTH and rejected > UNTRUSTED_SHARE * entries
    return None if untrusted else _sum_instances(merged)


def _sum_instances(merged: dict[tuple[int, tuple[int, int]], Usage]) -> dict[int, Usage]:
    by_pid: dict[int, Usage] = {}
    for (pid, _), usage in merged.items():
        total = by_pid.setdefault(pid, usage)
        if total is not usage:
            total.kinds += tuple(kind for kind in usage.kinds if kind not in total.kinds)
            known = total.used_bytes is not None and usage.used_bytes is not None
            total.used_bytes = (total.used_bytes or 0) + (usage.used_bytes or 0) if known else None
    return by_pid
