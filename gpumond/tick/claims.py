"""Limits on the claims of agents: the driver's count, the device's size and the number of pools. No I/O.

Any user can run an agent, and an agent can report any value. A claim therefore affects others (the ledger, unattributed
memory, rules on devices) only as far as the driver confirms it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from gpumond.facts.pools import PoolUsage, Reclaimable
from gpumond.facts.program import OTHER, ProcessKey
from gpumond.facts.snapshot import AgentReport, DeviceReading, ExcessClaim, Fault, Snapshot
from gpumond.facts.units import distinct_size_texts

MAX_POOLS = 32
"""Maximum number of pools of one agent that are kept; the others are summed for each device, as allocator ``OTHER``."""
MAX_REPORTED_POOLS = 64
"""Maximum number of pools of one message that are kept: eight allocators on eight devices."""
MAX_POOLS_OF_UID = 1024
"""Pools of all agents of one user. Beyond it, each of its agents has an equal share: eight of 128 agents."""

CLAIM_TOLERANCE_RATIO = 1 / 32
"""Share of the device's size by which a claim may exceed the driver's count, as both are read at different times."""


def fully_listed_devices(
    devices: Collection[DeviceReading],
    faults: Iterable[Fault],
    private_pid_namespace: bool | None,
    listing_sources: Collection[str] = (),
) -> frozenset[str]:
    """Return the devices on which a process holds no memory unless the driver lists it.

    A device is not among them if pids may mean other processes, behind an MPS server, with MIG, if processes are hidden
    from the daemon, or if its driver lists no process on any device. ``listing_sources``: sources whose driver is known
    to list processes.
    """
    if private_pid_namespace and any(device.vendor != "sim" for device in devices):
        return frozenset()
    parents = {device.parent_uuid for device in devices}
    uuids_with_hidden_processes = {fault.device_uuid for fault in faults if fault.kind == "processes_hidden"}
    listing_sources = {*listing_sources, *(device.source for device in devices if device.processes)}
    return frozenset(
        device.uuid
        for device in devices
        if device.processes is not None
        and device.source in listing_sources
        and device.parent_uuid is None
        and device.uuid not in parents
        and device.uuid not in uuids_with_hidden_processes
        and not device.has_mps_server
    )


def may_hold_memory(counts: Mapping[ProcessKey, int | None], process: ProcessKey, is_fully_listed: bool) -> bool:
    """Return False if the driver would list the process if it had memory on the device, and does not list it.

    A listed process with the same pid and an unknown start may be this one.
    """
    return not is_fully_listed or process in counts or ProcessKey(process.pid, None) in counts


def max_possible_bytes(
    device: DeviceReading, counts: Mapping[ProcessKey, int | None], process: ProcessKey
) -> int | None:
    """Return the maximum of bytes that this process can hold on the device; None if that is unknown."""
    count = counts.get(process)
    return device.used_bytes if count is None else count


def claim_tolerance_bytes(device: DeviceReading) -> int:
    return int(CLAIM_TOLERANCE_RATIO * (device.size_bytes or 0))


def held_bytes_by_device(pools: tuple[PoolUsage, ...]) -> dict[str, int]:
    """Return the held bytes that the driver counts for the process: managed memory is not among them."""
    sums: dict[str, int] = {}
    for pool in outermost_pools(pools):
        if not pool.managed:
            sums[pool.device_uuid] = sums.get(pool.device_uuid, 0) + pool.held_bytes
    return sums


def resident_managed_bytes(managed_bytes: Mapping[ProcessKey, int], unattributed_bytes: int) -> dict[ProcessKey, int]:
    """Return the managed bytes of each process that are attributed to it on a device, at most all.

    How many of them are on the device is unknown. Those that are belong to the used bytes that the driver counts for no
    process, so these are the limit; several processes share them by size.
    """
    total = sum(managed_bytes.values())
    if total <= unattributed_bytes:
        return dict(managed_bytes)
    return {process: size * unattributed_bytes // total for process, size in managed_bytes.items()}


def unmapped_bytes_by_device(pools: Iterable[PoolUsage]) -> dict[str, int]:
    """Return the unmapped bytes on each device where they are known."""
    sums: dict[str, int] = {}
    for pool in outermost_pools(pools):
        if pool.unmapped_bytes is not None:
            sums[pool.device_uuid] = sums.get(pool.device_uuid, 0) + pool.unmapped_bytes
    return sums


def outermost_pools(pools: Iterable[PoolUsage]) -> tuple[PoolUsage, ...]:
    """Return the pools of one process without those that allocate from another of its pools, such as CuPy on RMM."""
    pools = tuple(pools)
    if len(pools) < 2 or not any(pool.inside for pool in pools):
        return pools
    present = {(pool.allocator, pool.device_uuid) for pool in pools}
    return tuple(
        pool for pool in pools if pool.inside == pool.allocator or (pool.inside, pool.device_uuid) not in present
    )


def max_pools_by_person(reports: Iterable[AgentReport], person_uid: Callable[[int], int]) -> dict[int, int]:
    """Return an agent's maximum number of pools, for each person whose agents have more than ``MAX_POOLS_OF_UID``."""
    pools, agents = Counter[int](), Counter[int]()
    for report in reports:
        person = person_uid(report.uid)
        pools[person] += len(report.pools)
        agents[person] += 1
    return {
        person: max(1, min(MAX_POOLS, MAX_POOLS_OF_UID // agents[person]))
        for person, number in pools.items()
        if number > MAX_POOLS_OF_UID
    }


def limit_pools(
    pools: tuple[PoolUsage, ...], devices: Collection[str] | None = None, max_pools: int = MAX_POOLS
) -> tuple[PoolUsage, ...]:
    """Return at most ``max_pools`` pools and, for each of these devices, the sum of the others.

    Pools inside others are dropped first, since their bytes are counted in the outer pool. Pools on other devices and
    managed pools, whose place is unknown, are not summed. Without ``devices`` there are sums for at most ``max_pools``
    of those that the pools name.
    """
    if len(pools) <= max_pools:
        return pools
    outermost = outermost_pools(pools)
    kept_pools = [pool for pool in outermost if pool.allocator != OTHER][:max_pools]
    kept_ids = set(map(id, kept_pools))
    others: dict[str, list[PoolUsage]] = {}
    for pool in outermost:
        if id(pool) not in kept_ids and not pool.managed and (devices is None or pool.device_uuid in devices):
            others.setdefault(pool.device_uuid, []).append(pool)
    return (
        *kept_pools,
        *(_sum_of_pools(uuid, others[uuid]) for uuid in list(others)[: max_pools if devices is None else None]),
    )


_SUMMED_FIELDS = (
    *("live_bytes", "held_bytes", "stranded_bytes", "ooms", "retries", "device_allocations", "device_frees"),
    *("refilled_flushes", "spillable_bytes", "unmapped_bytes", "private_bytes", "live_allocations"),
)


def _sum_of_pools(uuid: str, pools: list[PoolUsage]) -> PoolUsage:
    """Return the sum of the pools. A value that one pool does not know is unknown; peaks are omitted."""
    low, likely, high = (sum(getattr(pool.reclaimable, name) for pool in pools) for name in ("low", "likely", "high"))
    exactness = {pool.reclaimable.exactness for pool in pools}
    values = {name: [getattr(pool, name) for pool in pools] for name in _SUMMED_FIELDS}
    sums: dict[str, Any] = {name: None if None in each else sum(each) for name, each in values.items()}
    return PoolUsage(
        allocator=OTHER,
        device_uuid=uuid,
        reclaimable=Reclaimable(low, likely, high, exactness.pop() if len(exactness) == 1 else "interval"),
        held_known=all(pool.held_known for pool in pools),
        **sums,
    )


MAX_CLAIM_AGE_SECONDS = 2.0
"""Maximum age of a claim that is compared: the program may have freed the memory of an older one."""
TICKS_UNTIL_FAULT = 2
"""Consecutive ticks after which an excess that cannot be unmapped is a fault."""
TICKS_UNTIL_UNMAPPED = 3
"""Consecutive ticks after which another excess is counted as unmapped. The second is one with a new report: an older
one doesn't state what the program has freed since.
"""


class _DriverCounts:
    """Counts of the driver. A device that does not answer has those of its last reading."""

    def __init__(
        self,
        devices: Collection[DeviceReading],
        fully_listed: Collection[str],
        previous: Snapshot | None,
        interval_seconds: float,
    ) -> None:
        self.interval_seconds = interval_seconds
        self.devices = {device.uuid: device for device in devices}
        self._previous = previous
        self.sizes = {device.uuid: device.size_bytes for device in devices}
        self.counts = {device.uuid: device.used_by_process for device in devices}
        self.processes = {process for each in self.counts.values() for process in each}
        self._fully_listed = fully_listed

    def confirms(self, process: ProcessKey, pool: PoolUsage) -> bool:
        """Return True if the driver counts at least the held bytes of this pool for the process."""
        count = self.counts.get(pool.device_uuid, {}).get(process)
        return count is not None and pool.held_bytes <= count and not _exceeds_size(pool, self.sizes[pool.device_uuid])

    def is_count_stable(self, process: ProcessKey, uuid: str) -> bool:
        """Return False while the count changes, as it does while a process is being suspended or resumed."""
        before = self._previous.device(uuid) if self._previous else None
        if before is None:
            return True
        if self._previous is not None and process in self._previous.possibly_suspended:
            return False
        return before.used_by_process.get(process) == self.counts[uuid].get(process)

    def may_list(self, process: ProcessKey, uuid: str) -> bool:
        return uuid in self.devices and may_hold_memory(self.counts[uuid], process, uuid in self._fully_listed)


def check_claims(
    reports: Collection[AgentReport],
    devices: Collection[DeviceReading],
    fully_listed: Collection[str],
    previous: Snapshot | None,
    faults: list[Fault],
    person_uid: Callable[[int], int],
    interval_seconds: float,
) -> tuple[tuple[AgentReport, ...], tuple[ExcessClaim, ...]]:
    """Return the reports, limited to possible values and to their number of pools, and the claims that exceed a limit.

    Adds a fault for each report that claims more than the driver counts for its process, unless the excess can be
    unmapped. ``interval_seconds``: the time since the previous snapshot.
    """
    if not reports:
        return (), ()
    driver = _DriverCounts(devices, fully_listed, previous, interval_seconds)
    previous_reports = previous.reports_by_process if previous else {}
    previous_excesses = previous.excesses if previous else ()
    ticks = {(each.process, each.device_uuid): each.ticks for each in previous_excesses if not each.allocator}
    checked: list[AgentReport] = []
    excesses: list[ExcessClaim] = []
    max_pools = max_pools_by_person(reports, person_uid)
    for report in reports:
        process = report.key
        if len(report.pools) == 1 and report.uses_device and driver.confirms(process, report.pools[0]):
            checked.append(report)  # nearly every report of nearly every tick
            continue
        previous_report = previous_reports.get(process)
        pools = limit_pools(report.pools, driver.sizes, max_pools.get(person_uid(report.uid), MAX_POOLS))
        fault = None
        for uuid, claimed in held_bytes_by_device(pools).items():
            if claimed <= (driver.counts.get(uuid, {}).get(process) or 0):
                continue
            excess = _excess_over_driver(report, uuid, claimed, driver, ticks.get((process, uuid), 0))
            if excess is None:
                continue
            unmapped = _unmapped_bytes(excess, pools, driver)
            if unmapped and excess.ticks >= TICKS_UNTIL_UNMAPPED:
                excess = replace(excess, unmapped_bytes=unmapped)
                pools = _subtract_unmapped(pools, uuid, unmapped)
            elif not unmapped and excess.ticks >= TICKS_UNTIL_FAULT and _is_fresh(report, driver.devices[uuid]):
                fault = fault or _excess_fault(excess, driver.devices[uuid])
            excesses.append(excess)
        if fault:
            faults.append(fault)
        oversized = [pool for pool in pools if _exceeds_size(pool, driver.sizes.get(pool.device_uuid))]
        if oversized:
            excesses += (
                _excess_over_size(report, each, driver)
                for each in oversized
                if driver.may_list(process, each.device_uuid)
            )
            pools = tuple(_limit_to_size(pool, driver.sizes.get(pool.device_uuid)) for pool in pools)
        uses_device = bool(
            (previous_report is not None and previous_report.uses_device)
            or process in driver.processes
            or any(pool.held_bytes or pool.live_bytes != 0 for pool in pools)
        )
        if pools is not report.pools or uses_device != report.uses_device:
            report = replace(report, pools=pools, uses_device=uses_device)
        checked.append(report)
    return tuple(checked), tuple(excesses)


def _excess_over_driver(
    report: AgentReport, uuid: str, claimed: int, driver: _DriverCounts, ticks: int
) -> ExcessClaim | None:
    """Return the excess of all pools together over the driver's count; None if there is none."""
    device = driver.devices.get(uuid)
    if device is None or not claimed:
        return None
    limit = max_possible_bytes(device, driver.counts[uuid], report.key) if driver.may_list(report.key, uuid) else 0
    if limit is None or claimed <= limit + claim_tolerance_bytes(device):
        return None
    counts_as_tick = ticks != 1 or report.age_seconds < driver.interval_seconds
    return ExcessClaim(
        pid=report.pid,
        start_ticks=report.start_ticks,
        device_uuid=uuid,
        workload=report.workload,
        claimed_bytes=claimed,
        limit_bytes=limit,
        ticks=ticks + (counts_as_tick and _is_fresh(report, device) and driver.is_count_stable(report.key, uuid)),
    )


def _is_fresh(report: AgentReport, device: DeviceReading) -> bool:
    return report.age_seconds < MAX_CLAIM_AGE_SECONDS and not device.missed_readings


def _excess_fault(excess: ExcessClaim, device: DeviceReading) -> Fault:
    claimed, counted = distinct_size_texts(excess.claimed_bytes, excess.limit_bytes)
    detail = f"the agent of pid {excess.pid} claims {claimed} on GPU {device.index}, but the driver counts {counted}"
    return Fault("agent", "report_exceeds_driver", None, detail)


def _unmapped_bytes(excess: ExcessClaim, pools: tuple[PoolUsage, ...], driver: _DriverCounts) -> int:
    """Return the excess if private pools explain it, else 0: then the agent is wrong.

    Nothing is known without the driver's count for the process, or if that of an MPS server contains it. At most the
    size of the device is unmapped.
    """
    uuid = excess.device_uuid
    if driver.counts[uuid].get(excess.process) is None or driver.devices[uuid].has_mps_server:
        return 0
    private_bytes = sum(
        _private_bytes(pool) for pool in outermost_pools(pools) if pool.device_uuid == uuid and not pool.managed
    )
    excess_bytes, size = excess.claimed_bytes - excess.limit_bytes, driver.sizes[uuid]
    max_unmapped = private_bytes if size is None else min(private_bytes, size)
    return (
        min(excess_bytes, max_unmapped)
        if excess_bytes <= max_unmapped + claim_tolerance_bytes(driver.devices[uuid])
        else 0
    )


def _private_bytes(pool: PoolUsage) -> int:
    return pool.held_bytes if pool.private_bytes is None else min(pool.private_bytes, pool.held_bytes)


def _subtract_unmapped(pools: tuple[PoolUsage, ...], uuid: str, unmapped: int) -> tuple[PoolUsage, ...]:
    """Subtract unmapped bytes from the private pools on a device. A program in sleep mode has them in use."""
    outermost_ids, result = {id(pool) for pool in outermost_pools(pools) if not pool.managed}, []
    for pool in pools:
        part = min(unmapped, _private_bytes(pool)) if pool.device_uuid == uuid and id(pool) in outermost_ids else 0
        if part:
            unmapped -= part
            pool = replace(
                _limit_live_and_held(
                    pool, None if pool.live_bytes is None else pool.live_bytes - part, pool.held_bytes - part
                ),
                unmapped_bytes=(pool.unmapped_bytes or 0) + part,
            )
        result.append(pool)
    return tuple(result)


def _limit_live_and_held(pool: PoolUsage, max_live: int | None, max_held: int) -> PoolUsage:
    """Return the pool with at most these live and held bytes. The number of allocations is then unknown, if the live
    bytes are fewer. Unknown live bytes stay unknown.
    """
    live = (
        None
        if pool.live_bytes is None
        else max(0, min(pool.live_bytes, max_held if max_live is None else max_live, max_held))
    )
    free = max_held - (live or 0)
    reported = pool.reclaimable
    low, likely, high = (min(each, free) for each in (reported.low, reported.likely, reported.high))
    return replace(
        pool,
        live_bytes=live,
        held_bytes=max_held,
        reclaimable=Reclaimable(low, likely, high, reported.exactness),
        stranded_bytes=min(pool.stranded_bytes, free - likely) if live is None else free - likely,
        live_allocations=pool.live_allocations if live == pool.live_bytes else None,
    )


def _exceeds_size(pool: PoolUsage, size: int | None) -> bool:
    return size is not None and (
        (pool.live_bytes or 0) > size
        or pool.held_bytes > size
        or pool.reclaimable.high > size
        or (pool.unmapped_bytes or 0) > size
    )


def _excess_over_size(report: AgentReport, pool: PoolUsage, driver: _DriverCounts) -> ExcessClaim:
    return ExcessClaim(
        pid=report.pid,
        start_ticks=report.start_ticks,
        device_uuid=pool.device_uuid,
        workload=report.workload,
        claimed_bytes=max(pool.live_bytes or 0, pool.held_bytes, pool.reclaimable.high, pool.unmapped_bytes or 0),
        limit_bytes=driver.sizes[pool.device_uuid] or 0,
        ticks=1,
        allocator=pool.allocator,
    )


def _limit_to_size(pool: PoolUsage, size: int | None) -> PoolUsage:
    """Limit each figure of a pool to the size of its device."""
    if size is None or not _exceeds_size(pool, size):
        return pool
    unmapped = None if pool.unmapped_bytes is None else min(pool.unmapped_bytes, size)
    return replace(_limit_live_and_held(pool, size, min(pool.held_bytes, size)), unmapped_bytes=unmapped)
