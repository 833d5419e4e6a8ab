"""Sums over the devices of this machine: one series each, from which the recording rules of a fleet read. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from gpumond.facts.frame import Frame
from gpumond.metrics.owners import OwnerUsage
from gpumond.quantities.table import Quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineUsage:
    """Bytes and numbers of programs on all devices whose memory is known."""

    size: int
    used: int
    idle_held: int
    idle_and_reclaimable: int
    wasted: int
    programs: int
    agent_programs: int


def usage(frame: Frame, own: Sequence[OwnerUsage]) -> Iterator[tuple[tuple[str, ...], MachineUsage]]:
    """Yield the sums; none while no device's memory is known. MIG instances are part of their device.

    ``own``: the use of each owner.
    """
    devices = [each for each in frame.snapshot.devices if each.parent_uuid is None and each.used_bytes is not None]
    if not devices:
        return
    unattributed = sum(size for (share,), size in shares(frame) if share == "unattributed")
    yield (
        (),
        MachineUsage(
            size=sum(device.size_bytes or 0 for device in devices),
            used=sum(device.used_bytes or 0 for device in devices),
            idle_held=sum(each.idle_held for each in own),
            idle_and_reclaimable=sum(each.idle_and_reclaimable or 0 for each in own),
            wasted=sum(each.wasted or 0 for each in own) + unattributed,
            programs=len(set[object]().union(*(each.programs for each in own))),
            agent_programs=len(set[object]().union(*(each.agents for each in own))),
        ),
    )


def shares(frame: Frame) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield the bytes of each share of the ledger."""
    roots = {device.uuid for device in frame.snapshot.devices if device.parent_uuid is None}
    sums: Counter[str] = Counter()
    for line in frame.ledger.lines:
        if line.device_uuid in roots:
            sums[line.share] += line.used_bytes
    for share, size in sums.items():
        yield (share,), size


MACHINE: tuple[Quantity[MachineUsage], ...] = (
    Quantity("memory_size_bytes", "bytes", "Memory of all devices of the machine.", attrgetter("size")),
    Quantity(
        "memory_used_bytes",
        "bytes",
        "Memory in use on all devices of the machine, as reported by the driver.",
        attrgetter("used"),
    ),
    Quantity("idle_held_bytes", "bytes", "Memory of programs with the verdict idle-holder.", attrgetter("idle_held")),
    Quantity(
        "idle_and_reclaimable_bytes",
        "bytes",
        "Memory of idle programs, and memory that a flush of the others would release.",
        attrgetter("idle_and_reclaimable"),
    ),
    Quantity(
        "wasted_bytes",
        "bytes",
        "Memory of idle programs, cached and stranded memory of the others, and unattributed memory.",
        attrgetter("wasted"),
    ),
    Quantity("programs", "count", "Number of processes with memory on a device.", attrgetter("programs")),
    Quantity(
        "agent_programs",
        "count",
        "Number of processes with memory on a device that have an agent.",
        attrgetter("agent_programs"),
    ),
)
