"""Memory by owner: workload, user, namespace and account, of each model of device; which owners have series of their
own; and the sums over the machine, from which the recording rules of a fleet read. No series has a pid or a UUID. No
I/O.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from gpumond.facts.frame import Frame, Verdict
from gpumond.facts.program import ProcessKey
from gpumond.facts.shares import Share
from gpumond.facts.snapshot import Owner, Snapshot
from gpumond.facts.verdicts import PATTERN_NAMES
from gpumond.quantities.quantity import Quantity, attribute_quantity

OWNER_LABELS = ("workload", "user", "pod_namespace", "slurm_account")


@dataclass(slots=True)
class OwnerUsage:
    """Bytes of an owner's programs on the devices of one model; None if no program's bytes are known."""

    used_bytes: int = 0
    needed_bytes: int = 0
    device_processes: int = 0
    idle_held_bytes: int = 0
    live_bytes: int | None = None
    cached_bytes: int | None = None
    stranded_bytes: int | None = None
    idle_and_reclaimable_bytes: int | None = None
    wasted_bytes: int | None = None
    processes: set[ProcessKey] = field(default_factory=set)
    agents: set[ProcessKey] = field(default_factory=set)

    def add(self, process: ProcessKey, shares: Mapping[Share, int], is_idle: bool, has_agent: bool) -> None:
        """Add one program on one device. ``shares``: its lines of the ledger."""
        used, cached, stranded = sum(shares.values()), shares.get("cached", 0), shares.get("stranded", 0)
        self.used_bytes += used
        self.needed_bytes = max(self.needed_bytes, used - cached)
        self.device_processes += 1
        self.processes.add(process)
        if has_agent:
            self.agents.add(process)
        has_shares = "live" in shares
        if has_shares:
            self.live_bytes = (self.live_bytes or 0) + shares["live"]
            self.cached_bytes = (self.cached_bytes or 0) + cached
            self.stranded_bytes = (self.stranded_bytes or 0) + stranded
        if is_idle:
            self.idle_held_bytes += used
        if is_idle or has_shares:
            reclaimable = used if is_idle else cached
            self.idle_and_reclaimable_bytes = (self.idle_and_reclaimable_bytes or 0) + reclaimable
            self.wasted_bytes = (self.wasted_bytes or 0) + reclaimable + (0 if is_idle else stranded)


def usages(frame: Frame) -> Iterator[tuple[tuple[str, ...], OwnerUsage]]:
    """Yield the use of each owner on each model. The lines of MIG instances are part of their device's."""
    models = {device.uuid: device.name for device in frame.snapshot.devices if device.parent_uuid is None}
    shares_by_process: dict[tuple[str, int, int | None], dict[Share, int]] = {}
    for line in frame.ledger.lines:
        if line.pid is not None and line.device_uuid in models:
            shares = shares_by_process.setdefault((line.device_uuid, line.pid, line.start_ticks), {})
            shares[line.share] = shares.get(line.share, 0) + line.used_bytes
    idle = {(each.device_uuid, each.process) for each in frame.verdicts if each.kind == "idle-holder"}
    owners, reports = frame.snapshot.owners, frame.snapshot.reports_by_process
    by_owner: defaultdict[tuple[str, ...], OwnerUsage] = defaultdict(OwnerUsage)
    for (uuid, pid, start_ticks), shares in shares_by_process.items():
        process = ProcessKey(pid, start_ticks)
        labels = (*series_owner(owners.get(process, NO_OWNER), frame.owners), models[uuid])
        by_owner[labels].add(process, shares, (uuid, process) in idle, process in reports)
    yield from by_owner.items()


_AGENTS_ONLY = " Only programs with an agent are included."
OWNER_QUANTITIES: tuple[Quantity[OwnerUsage], ...] = (
    attribute_quantity(
        "used_bytes",
        "Memory of the owner's programs, with or without an agent, on devices of one model.",
        note=" A device's MIG instances are included.",
    ),
    attribute_quantity("live_bytes", "Live memory of the owner's programs." + _AGENTS_ONLY),
    attribute_quantity(
        "cached_bytes",
        "Cached memory of the owner's programs, which a flush would release." + _AGENTS_ONLY,
    ),
    attribute_quantity(
        "stranded_bytes",
        "Stranded memory of the owner's programs, which a flush can't release." + _AGENTS_ONLY,
    ),
    attribute_quantity(
        "idle_held_bytes",
        "Memory of the owner's idle programs (verdict idle-holder), with or without an agent.",
    ),
    attribute_quantity(
        "idle_and_reclaimable_bytes",
        "Memory of the owner's idle programs, and cached memory of the owner's other programs with an agent.",
    ),
    attribute_quantity(
        "wasted_bytes",
        "Memory of the owner's idle programs, and cached and stranded memory of the owner's other programs with an "
        "agent.",
    ),
    attribute_quantity(
        "needed_bytes",
        "Current memory use, without cached memory, of the owner's largest process on a single device.",
    ),
    attribute_quantity(
        "device_processes",
        "Number of the owner's processes on devices of one model; a process on two devices is counted twice.",
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
    """Yield the number of verdicts of each owner and kind, except patterns."""
    unhealthy = [each for each in frame.verdicts if each.kind not in PATTERN_NAMES]
    counts = Counter((*owner, verdict.kind) for owner, verdict in _with_owners(frame, unhealthy))
    yield from counts.items()


def time_to_full(frame: Frame) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield the lowest estimate of each owner."""
    estimates = [each for each in frame.verdicts if each.time_to_full_seconds is not None]
    times: dict[tuple[str, ...], float] = {}
    for owner, verdict in _with_owners(frame, estimates):
        times[owner] = min(verdict.time_to_full_seconds or 0.0, times.get(owner, inf))
    yield from times.items()


def _with_owners(frame: Frame, verdicts: Sequence[Verdict]) -> Iterator[tuple[Owner, Verdict]]:
    """Yield verdicts with the owners that are shown."""
    owners = frame.snapshot.owners if verdicts else {}
    for verdict in verdicts:
        owner = NO_OWNER if verdict.process is None else owners.get(verdict.process, NO_OWNER)
        yield series_owner(owner, frame.owners), verdict


MAX_OWNERS = 64
"""Owners with series of their own: as many with a workload, and as many without."""
OWNER_RETENTION_SECONDS = 86_400.0
"""Time for which an owner without a program keeps its series, so a day has at most ``MAX_OWNERS`` of them."""


def owners_with_series(before: Mapping[Owner, float], snapshot: Snapshot) -> dict[Owner, float]:
    """Return the owners that have series, with the elapsed seconds at which each last had a program.

    ``before``: those of the previous frame. An owner beyond the limit is replaced by the same one without its workload.
    """
    now = snapshot.elapsed_seconds
    owners = {owner: seen_at for owner, seen_at in before.items() if now - seen_at < OWNER_RETENTION_SECONDS}
    with_workload = sum(bool(owner.workload) for owner in owners)
    available = {True: MAX_OWNERS - with_workload, False: MAX_OWNERS - (len(owners) - with_workload)}
    for owner in dict.fromkeys(snapshot.owners.values()):
        for each in (owner, owner.without_workload()):
            if each not in owners:
                if available[bool(each.workload)] <= 0:
                    continue
                available[bool(each.workload)] -= 1
            owners[each] = now
            break
    return owners


def series_owner(owner: Owner, owners: Mapping[Owner, float] | None) -> Owner:
    """Return the owner whose series contain this one: itself, itself without its workload, or the one without labels.

    ``owners``: those with series; None if all have.
    """
    if owners is None or owner in owners:
        return owner
    without_workload = owner.without_workload()
    return without_workload if without_workload in owners else NO_OWNER


NO_OWNER = Owner()


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineUsage:
    """Bytes and numbers of processes on all devices whose memory is known."""

    memory_size_bytes: int
    memory_used_bytes: int
    idle_held_bytes: int
    idle_and_reclaimable_bytes: int
    wasted_bytes: int
    processes: int
    agent_processes: int


def machine_usage(frame: Frame, owner_usages: Sequence[OwnerUsage]) -> Iterator[tuple[tuple[str, ...], MachineUsage]]:
    """Yield the sums; none while no device's memory is known. MIG instances are part of their device.

    ``owner_usages``: the use of each owner on each model.
    """
    devices = [each for each in frame.snapshot.devices if each.parent_uuid is None and each.used_bytes is not None]
    if not devices:
        return
    unattributed = sum(size for (share,), size in machine_shares(frame) if share == "unattributed")
    yield (
        (),
        MachineUsage(
            memory_size_bytes=sum(device.size_bytes or 0 for device in devices),
            memory_used_bytes=sum(device.used_bytes or 0 for device in devices),
            idle_held_bytes=sum(each.idle_held_bytes for each in owner_usages),
            idle_and_reclaimable_bytes=sum(each.idle_and_reclaimable_bytes or 0 for each in owner_usages),
            wasted_bytes=sum(each.wasted_bytes or 0 for each in owner_usages) + unattributed,
            processes=len(set[object]().union(*(each.processes for each in owner_usages))),
            agent_processes=len(set[object]().union(*(each.agents for each in owner_usages))),
        ),
    )


def machine_shares(frame: Frame) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield the bytes of each share of the ledger."""
    roots = {device.uuid for device in frame.snapshot.devices if device.parent_uuid is None}
    sums: Counter[str] = Counter()
    for (uuid, name), size in frame.share_bytes.items():
        if uuid in roots:
            sums[name] += size
    for share, size in sums.items():
        yield (share,), size


MACHINE_QUANTITIES: tuple[Quantity[MachineUsage], ...] = (
    attribute_quantity("memory_size_bytes", "Total memory of the machine's devices."),
    attribute_quantity(
        "memory_used_bytes",
        "Used memory on the machine's devices, as reported by the driver.",
    ),
    attribute_quantity("idle_held_bytes", "Memory of idle programs (verdict idle-holder)."),
    attribute_quantity(
        "idle_and_reclaimable_bytes",
        "Memory of idle programs, and memory that a flush of all other programs would release.",
    ),
    attribute_quantity(
        "wasted_bytes",
        "Memory of idle programs, cached and stranded memory of all other programs, and unattributed memory.",
    ),
    attribute_quantity("processes", "Number of processes that use device memory."),
    attribute_quantity(
        "agent_processes",
        "Number of processes that use device memory and have an agent.",
    ),
)
