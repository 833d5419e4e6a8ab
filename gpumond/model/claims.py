"""Limits on the claims of agents: the driver's count, the device's size and the number of pools. No I/O.

Any user can run an agent, and an agent can report any value. A claim therefore affects others (the ledger, unclaimed
memory, rules on devices) only as far as the driver confirms it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping

from gpumond.model.pools import PoolUsage, Reclaimable
from gpumond.model.process import ProcessKey
from gpumond.model.program import OTHER
from gpumond.model.snapshot import AgentReport, DeviceReading, Fault

MAX_POOLS = 32
"""Most pools of one agent that are kept; the others are summed for each device, with the allocator ``OTHER``."""
MAX_REPORTED_POOLS = 64
"""Most pools of one message that are kept: eight allocators on eight devices."""
MAX_POOLS_OF_UID = 1024
"""Pools of all agents of one user. Beyond it, each of its agents has an equal share: eight of 128 agents."""

SLACK_RATIO = 1 / 32
"""Share of the device's size by which a claim may exceed the driver's count, as both are read at different times."""


def complete_lists(
    devices: Collection[DeviceReading],
    faults: Iterable[Fault],
    private_pid_namespace: bool | None,
    listing: Collection[str] = (),
) -> frozenset[str]:
    """Return the devices on which a process holds no memory unless the driver lists it.

    A device is not among them if pids may mean other processes, behind an MPS server, with MIG, if processes are
    hidden from the daemon, or if its driver lists no process on any device. ``listing``: sources whose driver is known
    to list processes.
    """
    if private_pid_namespace and any(device.vendor != "sim" for device in devices):
        return frozenset()
    parents = {device.parent_uuid for device in devices}
    hidden = {fault.device_uuid for fault in faults if fault.kind == "processes_hidden"}
    listing = {*listing, *(device.source for device in devices if device.processes)}
    return frozenset(
        device.uuid
        for device in devices
        if device.processes is not None
        and device.source in listing
        and device.parent_uuid is None
        and device.uuid not in parents
        and device.uuid not in hidden
        and not device.has_mps_server
    )


def is_confirmed(counts: Mapping[ProcessKey, int | None], process: ProcessKey, complete: bool) -> bool:
    """Return False if the driver would list the process if it had memory on the device, and does not list it.

    A listed process with the same pid and an unknown start may be this one.
    """
    return not complete or process in counts or ProcessKey(process.pid, None) in counts


def limit(device: DeviceReading, counts: Mapping[ProcessKey, int | None], process: ProcessKey) -> int | None:
    """Return the most that this process can hold on the device, in bytes; None if it is unknown."""
    count = counts.get(process)
    return device.used_bytes if count is None else count


def slack(device: DeviceReading) -> int:
    return int(SLACK_RATIO * (device.size_bytes or 0))


def held_by_device(pools: tuple[PoolUsage, ...]) -> dict[str, int]:
    """Return the held bytes that the driver counts for the process: managed memory is not among them."""
    if len(pools) == 1 and not pools[0].managed:
        return {pools[0].device_uuid: pools[0].held_bytes}  # nearly every report of nearly every tick
    sums: dict[str, int] = {}
    for pool in outermost(pools):
        if not pool.managed:
            sums[pool.device_uuid] = sums.get(pool.device_uuid, 0) + pool.held_bytes
    return sums


def resident(managed: Mapping[ProcessKey, int], unattributed: int) -> dict[ProcessKey, int]:
    """Return the managed bytes of each process that are attributed to it on a device, at most all.

    How many of them are on the device is unknown. Those that are belong to the used bytes that the driver counts for no
    process, so that these are the limit; several processes share them by size.
    """
    total = sum(managed.values())
    if total <= unattributed:
        return dict(managed)
    return {process: size * unattributed // total for process, size in managed.items()}


def unmapped_by_device(pools: Iterable[PoolUsage]) -> dict[str, int]:
    """Return the unmapped bytes on each device where they are known."""
    sums: dict[str, int] = {}
    for pool in outermost(pools):
        if pool.unmapped_bytes is not None:
            sums[pool.device_uuid] = sums.get(pool.device_uuid, 0) + pool.unmapped_bytes
    return sums


def outermost(pools: Iterable[PoolUsage]) -> tuple[PoolUsage, ...]:
    """Return the pools of one process without those that allocate from another of its pools, such as CuPy on RMM."""
    pools = tuple(pools)
    if len(pools) < 2 or not any(pool.inside for pool in pools):
        return pools
    present = {(pool.allocator, pool.device_uuid) for pool in pools}
    return tuple(
        pool for pool in pools if pool.inside == pool.allocator or (pool.inside, pool.device_uuid) not in present
    )


def shares_of_pools(reports: Iterable[AgentReport], person_of: Callable[[int], int]) -> dict[int, int]:
    """Return the most pools of one agent for each person whose agents have more than ``MAX_POOLS_OF_UID``."""
    pools, agents = Counter[int](), Counter[int]()
    for report in reports:
        person = person_of(report.uid)
        pools[person] += len(report.pools)
        agents[person] += 1
    return {
        person: max(1, min(MAX_POOLS, MAX_POOLS_OF_UID // agents[person]))
        for person, number in pools.items()
        if number > MAX_POOLS_OF_UID
    }


def bounded(
    pools: tuple[PoolUsage, ...], devices: Collection[str] | None = None, most: int = MAX_POOLS
) -> tuple[PoolUsage, ...]:
    """Return at most ``most`` pools and, for each of these devices, the sum of the others.

    Pools inside others are dropped first, since their bytes are counted in the outer pool. Pools on other devices
    and managed pools, whose place is unknown, are not summed. Without ``devices`` there are sums for at most ``most``
    of those that the pools name.
    """
    if len(pools) <= most:
        return pools
    outer = outermost(pools)
    kept = [pool for pool in outer if pool.allocator != OTHER][:most]
    own = set(map(id, kept))
    rest: dict[str, list[PoolUsage]] = {}
    for pool in outer:
        if id(pool) not in own and not pool.managed and (devices is None or pool.device_uuid in devices):
            rest.setdefault(pool.device_uuid, []).append(pool)
    return (*kept, *(_sum(uuid, rest[uuid]) for uuid in list(rest)[: most if devices is None else None]))


def _sum(uuid: str, pools: list[PoolUsage]) -> PoolUsage:
    """Return the sum of the pools. A counter that one pool does not know is unknown; peaks are omitted."""
    held = stranded = low = likely = high = thrashes = 0
    for pool in pools:
        flush = pool.reclaimable
        held, stranded = held + pool.held_bytes, stranded + pool.stranded_bytes
        low, likely, high = low + flush.low, likely + flush.likely, high + flush.high
        thrashes += pool.thrashes
    exactness = {pool.reclaimable.exactness for pool in pools}
    return PoolUsage(
        allocator=OTHER,
        device_uuid=uuid,
        live_bytes=_known([pool.live_bytes for pool in pools]),
        held_bytes=held,
        reclaimable=Reclaimable(low, likely, high, exactness.pop() if len(exactness) == 1 else "interval"),
        stranded_bytes=stranded,
        ooms=_known([pool.ooms for pool in pools]),
        retries=_known([pool.retries for pool in pools]),
        device_allocations=_known([pool.device_allocations for pool in pools]),
        device_frees=_known([pool.device_frees for pool in pools]),
        thrashes=thrashes,
        held_known=all(pool.held_known for pool in pools),
        spillable_bytes=_known([pool.spillable_bytes for pool in pools]),
        unmapped_bytes=_known([pool.unmapped_bytes for pool in pools]),
        private_bytes=_known([pool.private_bytes for pool in pools]),
        live_allocations=_known([pool.live_allocations for pool in pools]),
    )


def _known(values: list[int | None]) -> int | None:
    return None if None in values else sum(value for value in values if value is not None)
