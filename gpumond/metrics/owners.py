"""Memory by owner: workload, user, namespace and account, of each model of device; which owners have series of their
own; and the sums over the machine, from which the recording rules of a fleet read. No series has a pid or a UUID. No
I/O.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter

from gpumond.facts.frame import Frame, Verdict
from gpumond.facts.program import ProcessKey
from gpumond.facts.shares import Share
from gpumond.facts.snapshot import Owner, Snapshot
from gpumond.facts.verdicts import PATTERN_NAMES
from gpumond.quantities.quantity import Quantity

OWNER_LABELS = ("workload", "user", "pod_namespace", "slurm_account")


@dataclass(slots=True)
class OwnerUsage:
    """Bytes of an owner's programs on the devices of one model; None if no program's bytes are known."""

    used: int = 0
    needed: int = 0
    device_processes: int = 0
    idle_held: int = 0
    live: int | None = None
    cached: int | None = None
    stranded: int | None = None
    idle_and_reclaimable: int | None = None
    wasted: int | None = None
    processes: set[ProcessKey] = field(default_factory=set)
    agents: set[ProcessKey] = field(default_factory=set)

    def add(self, process: ProcessKey, shares: Mapping[Share, int], idle: bool, has_agent: bool) -> None:
        """Add one program on one device. ``shares``: its lines of the ledger."""
        used, cached, stranded = sum(shares.values()), shares.get("cached", 0), shares.get("stranded", 0)
        self.used += used
        self.needed = max(self.needed, used - cached)
        self.device_processes += 1
        self.processes.add(process)
        if has_agent:
            self.agents.add(process)
        known = "live" in shares
        if known:
            self.live = (self.live or 0) + shares["live"]
            self.cached = (self.cached or 0) + cached
            self.stranded = (self.stranded or 0) + stranded
        if idle:
            self.idle_held += used
        if idle or known:
            reclaimable = used if idle else cached
            self.idle_and_reclaimable = (self.idle_and_reclaimable or 0) + reclaimable
            self.wasted = (self.wasted or 0) + reclaimable + (0 if idle else stranded)


def usages(frame: Frame) -> Iterator[tuple[tuple[str, ...], OwnerUsage]]:
    """Yield the use of each owner on each model. The lines of MIG instances are part of their device's."""
    models = {device.uuid: device.name for device in frame.snapshot.devices if device.parent_uuid is None}
    held: dict[tuple[str, int, int | None], dict[Share, int]] = {}
    for line in frame.ledger.lines:
        if line.pid is not None and line.device_uuid in models:
            own = held.setdefault((line.device_uuid, line.pid, line.start_ticks), {})
            own[line.share] = own.get(line.share, 0) + line.used_bytes
    idle = {(each.device_uuid, each.process) for each in frame.verdicts if each.kind == "idle-holder"}
    owners, reports = frame.snapshot.owners, frame.snapshot.reports_by_process
    found: defaultdict[tuple[str, ...], OwnerUsage] = defaultdict(OwnerUsage)
    for (uuid, pid, start_ticks), shares in held.items():
        process = ProcessKey(pid, start_ticks)
        labels = (*series_owner(owners.get(process, NOBODY), frame.owners), models[uuid])
        found[labels].add(process, shares, (uuid, process) in idle, process in reports)
    yield from found.items()


_LOWER = " Only programs with an agent are included."
OWNER: tuple[Quantity[OwnerUsage], ...] = (
    Quantity(
        "used_bytes",
        "Memory of the owner's programs, with or without an agent, on devices of one model.",
        attrgetter("used"),
        note=" A device's MIG instances are included.",
    ),
    Quantity("live_bytes", "Live memory of the owner's programs." + _LOWER, attrgetter("live")),
    Quantity(
        "cached_bytes",
        "Cached memory of the owner's programs, which a flush would release." + _LOWER,
        attrgetter("cached"),
    ),
    Quantity(
        "stranded_bytes",
        "Stranded memory of the owner's programs, which a flush can't release." + _LOWER,
        attrgetter("stranded"),
    ),
    Quantity(
        "idle_held_bytes",
        "Memory of the owner's idle programs (verdict idle-holder), with or without an agent.",
        attrgetter("idle_held"),
    ),
    Quantity(
        "idle_and_reclaimable_bytes",
        "Memory of the owner's idle programs, and cached memory of the owner's other programs with an agent.",
        attrgetter("idle_and_reclaimable"),
    ),
    Quantity(
        "wasted_bytes",
        "Memory of the owner's idle programs, and cached and stranded memory of the owner's other programs with an "
        "agent.",
        attrgetter("wasted"),
    ),
    Quantity(
        "needed_bytes",
        "Highest memory use, without cached memory, of any of the owner's processes on one device.",
        attrgetter("needed"),
    ),
    Quantity(
        "device_processes",
        "Number of the owner's processes on devices of one model; a process on two devices is counted twice.",
        attrgetter("device_processes"),
    ),
    Quantity(
        "processes",
        "Number of the owner's processes that use memory on devices of one model.",
        lambda usage: len(usage.processes),
    ),
    Quantity(
        "agent_processes",
        "Number of the owner's processes that use memory on devices of one model and have an agent.",
        lambda usage: len(usage.agents),
    ),
)


def verdicts(frame: Frame) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield the number of verdicts of each owner and kind, except shapes."""
    found = [each for each in frame.verdicts if each.kind not in PATTERN_NAMES]
    counts = Counter((*owner, verdict.kind) for owner, verdict in _with_owners(frame, found))
    yield from counts.items()


def time_to_full(frame: Frame) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield the lowest estimate of each owner."""
    found = [each for each in frame.verdicts if each.time_to_full_seconds is not None]
    times: dict[tuple[str, ...], float] = {}
    for owner, verdict in _with_owners(frame, found):
        times[owner] = min(verdict.time_to_full_seconds or 0.0, times.get(owner, inf))
    yield from times.items()


def _with_owners(frame: Frame, verdicts: Sequence[Verdict]) -> Iterator[tuple[Owner, Verdict]]:
    """Yield verdicts with the owners that are shown."""
    owners = frame.snapshot.owners if verdicts else {}
    for verdict in verdicts:
        owner = NOBODY if verdict.process is None else owners.get(verdict.process, NOBODY)
        yield series_owner(owner, frame.owners), verdict


MAX_OWNERS = 64
"""Owners with series of their own: this number of those with a workload, and of those without."""
KEPT_SECONDS = 86_400.0
"""Time for which an owner without a program keeps its place, so a day has at most ``MAX_OWNERS`` of them."""


def owners_with_series(before: Mapping[Owner, float], snapshot: Snapshot) -> dict[Owner, float]:
    """Return the owners that have series, with the elapsed seconds at which each last had a program.

    ``before``: those of the previous frame. An owner beyond the limit is replaced by the same one without its workload.
    """
    now = snapshot.elapsed_seconds
    kept = {owner: seen for owner, seen in before.items() if now - seen < KEPT_SECONDS}
    named = sum(bool(owner.workload) for owner in kept)
    room = {True: MAX_OWNERS - named, False: MAX_OWNERS - (len(kept) - named)}
    for owner in dict.fromkeys(snapshot.owners.values()):
        for each in (owner, owner.without_workload()):
            if each not in kept:
                if room[bool(each.workload)] <= 0:
                    continue
                room[bool(each.workload)] -= 1
            kept[each] = now
            break
    return kept


def series_owner(owner: Owner, owners: Mapping[Owner, float] | None) -> Owner:
    """Return the owner whose series contain this one: itself, itself without its workload, or the one without labels.

    ``owners``: those with series; None if all have.
    """
    if owners is None or owner in owners:
        return owner
    coarse = owner.without_workload()
    return coarse if coarse in owners else NOBODY


NOBODY = Owner()


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineUsage:
    """Bytes and numbers of processes on all devices whose memory is known."""

    size: int
    used: int
    idle_held: int
    idle_and_reclaimable: int
    wasted: int
    processes: int
    agent_processes: int


def machine_usage(frame: Frame, own: Sequence[OwnerUsage]) -> Iterator[tuple[tuple[str, ...], MachineUsage]]:
    """Yield the sums; none while no device's memory is known. MIG instances are part of their device.

    ``own``: the use of each owner.
    """
    devices = [each for each in frame.snapshot.devices if each.parent_uuid is None and each.used_bytes is not None]
    if not devices:
        return
    unattributed = sum(size for (share,), size in machine_shares(frame) if share == "unattributed")
    yield (
        (),
        MachineUsage(
            size=sum(device.size_bytes or 0 for device in devices),
            used=sum(device.used_bytes or 0 for device in devices),
            idle_held=sum(each.idle_held for each in own),
            idle_and_reclaimable=sum(each.idle_and_reclaimable or 0 for each in own),
            wasted=sum(each.wasted or 0 for each in own) + unattributed,
            processes=len(set[object]().union(*(each.processes for each in own))),
            agent_processes=len(set[object]().union(*(each.agents for each in own))),
        ),
    )


def machine_shares(frame: Frame) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield the bytes of each share of the ledger."""
    roots = {device.uuid for device in frame.snapshot.devices if device.parent_uuid is None}
    sums: Counter[str] = Counter()
    for (uuid, name), size in frame.shares.items():
        if uuid in roots:
            sums[name] += size
    for share, size in sums.items():
        yield (share,), size


MACHINE: tuple[Quantity[MachineUsage], ...] = (
    Quantity("memory_size_bytes", "Total memory of the machine's devices.", attrgetter("size")),
    Quantity(
        "memory_used_bytes",
        "Used memory on the machine's devices, as reported by the driver.",
        attrgetter("used"),
    ),
    Quantity("idle_held_bytes", "Memory of idle programs (verdict idle-holder).", attrgetter("idle_held")),
    Quantity(
        "idle_and_reclaimable_bytes",
        "Memory of idle programs, and memory that a flush of all other programs would release.",
        attrgetter("idle_and_reclaimable"),
    ),
    Quantity(
        "wasted_bytes",
        "Memory of idle programs, cached and stranded memory of all other programs, and unattributed memory.",
        attrgetter("wasted"),
    ),
    Quantity("processes", "Number of processes that use device memory.", attrgetter("processes")),
    Quantity(
        "agent_processes",
        "Number of processes that use device memory and have an agent.",
        attrgetter("agent_processes"),
    ),
)
