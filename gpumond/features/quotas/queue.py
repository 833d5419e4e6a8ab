"""Decisions on requests for device memory: which start now, and which caches are flushed for them. No I/O.

Each user has a queue for each device, and the users take turns. A request that free memory, flushes or the end of
other users' grants can satisfy keeps later requests back for a limited time; one that needs the end of a program keeps
back those of its own user only. A granted request counts as used until its program has allocated the memory, or its
deadline has passed. For other users, all grants of a user count up to the largest of them, or an equal share of the
device if that is more.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gpumond.facts.process import ProcessKey
from gpumond.facts.quota import NO_QUOTA, ReclaimPolicy
from gpumond.facts.snapshot import AgentReport, DeviceReading, Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingRequest:
    """A request for ``need_bytes`` of one device. ``uid``: the user whose programs may be flushed for it; None for all
    users. ``grant_seconds``: the time that the program has to allocate the memory. ``user``: in whose queue it is.
    ``whole``: see Grant.
    """

    id: str
    device_uuid: str
    need_bytes: int
    grant_seconds: float
    uid: int | None = None
    user: str = ""
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Grant:
    """A request that was granted, until its program has the memory or ``deadline`` (elapsed seconds). ``whole``: it
    counts completely for all users, since a restore that runs out of memory never returns.
    """

    id: str
    device_uuid: str
    need_bytes: int
    deadline: float
    user: str = ""
    whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Competitor:
    """A program on the device that may be flushed or suspended. ``thrashes``: how often it allocated flushed memory
    again. ``suspendable_bytes``: what its suspension returns, its cache included; 0 if it may not be suspended now.
    """

    process: ProcessKey
    uid: int
    workload: str
    reclaimable_bytes: int
    idle_seconds: float | None = None
    thrashes: int = 0
    suspendable_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Memory of one device. ``free_bytes`` is None if unknown.

    ``reserved_bytes``: the part of the reserves of quotas that their programs do not use. ``flushable_users``: the
    users whose programs may be flushed for them; None for all users.
    """

    uuid: str
    size_bytes: int | None
    free_bytes: int | None
    reserved_bytes: int = 0
    flushable_users: frozenset[int] | None = None
    neighbors: tuple[Competitor, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """The flushes and suspensions after which a request fits. ``missing_bytes``: what is missing even after them; then
    none is due.
    """

    available_bytes: int | None
    flushes: tuple[Competitor, ...] = ()
    missing_bytes: int = 0
    suspensions: tuple[Competitor, ...] = ()

    @property
    def fits(self) -> bool:
        """True if the request fits without a flush or suspension."""
        return self.available_bytes is not None and not (self.flushes or self.suspensions or self.missing_bytes)


@dataclass(frozen=True, slots=True)
class Queue:
    """Requests in the order of their arrival, and grants whose memory is not allocated yet."""

    waiting: tuple[WaitingRequest, ...] = ()
    grants: tuple[Grant, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """``plans``: by id, the plan of the first request of each user on a device; by UUID, that of reserves that do not
    fit. ``holders``: the request of each device for which programs are flushed.
    """

    queue: Queue
    granted: tuple[WaitingRequest, ...] = ()
    plans: Mapping[str, Plan] = field(default_factory=dict)
    holders: tuple[str, ...] = ()


def decide(
    queue: Queue,
    rooms: Iterable[Room],
    allocated: Mapping[str, int],
    ended: Collection[str],
    now: float,
    passed: Collection[str] = (),
) -> Decision:
    """Return the requests that are granted now, and the plans of those that wait at the head of a user's queue.

    ``allocated``: bytes that the program of each grant holds on its device. ``ended``: grants whose program has ended.
    ``passed``: requests that have kept others back for long enough.
    """
    grants = [
        grant
        for grant in queue.grants
        if grant.id not in ended and now < grant.deadline and allocated.get(grant.id, 0) < grant.need_bytes
    ]
    granted: list[WaitingRequest] = []
    plans: dict[str, Plan] = {}
    holders: list[str] = []
    for room in rooms:
        available = available_bytes(room, grants, allocated)
        if available is not None and available < 0 and room.reserved_bytes:
            allowed = room.flushable_users
            flushable = [each for each in room.neighbors if allowed is None or each.uid in allowed]
            plans[room.uuid] = reclaim_plan(flushable, min(-available, room.reserved_bytes), available)
        able: list[str] = []
        stopped: set[str] = set()
        order = in_turn(queue.waiting, grants, room.uuid)
        users = {request.user for request in order}
        for request in order:
            if request.user in stopped:
                continue
            available = available_bytes(room, grants, allocated, request.user, users)
            if available is not None and request.need_bytes <= available:
                granted.append(request)
                deadline = now + request.grant_seconds
                grants.append(Grant(request.id, room.uuid, request.need_bytes, deadline, request.user, request.whole))
                continue
            found = plans[request.id] = plan(room, request, available)
            stopped.add(request.user)
            without = available_bytes(room, [grant for grant in grants if grant.user == request.user], allocated)
            if available is None or without is None or found.missing_bytes <= without - available:
                able.append(request.id)
                if request.id not in passed:
                    break
        holders += able[-1:] if able and able[-1] not in passed else able[:1]
    started = {request.id for request in granted}
    waiting = tuple(request for request in queue.waiting if request.id not in started)
    return Decision(Queue(waiting, tuple(grants)), tuple(granted), plans, tuple(holders))


def in_turn(waiting: Iterable[WaitingRequest], grants: Iterable[Grant], device_uuid: str) -> list[WaitingRequest]:
    """Return the requests for a device: the first of each user before the second of any, else by arrival.

    The grants of a user, which precede the requests, count as well.
    """
    places = Counter(grant.user for grant in grants if grant.device_uuid == device_uuid)
    ranked: list[tuple[int, WaitingRequest]] = []
    for request in waiting:
        if request.device_uuid == device_uuid:
            ranked.append((places[request.user], request))
            places[request.user] += 1
    return [request for _, request in sorted(ranked, key=lambda each: each[0])]


def available_bytes(
    room: Room,
    grants: Iterable[Grant],
    allocated: Mapping[str, int],
    user: str | None = None,
    users: Collection[str] = (),
) -> int | None:
    """Return the free bytes that neither a grant nor a reserve claims; negative if these exceed the free bytes.

    For ``user``, the claims of another user are limited. ``users`` are those who wait.
    """
    if room.free_bytes is None:
        return None
    claims: defaultdict[str, list[int]] = defaultdict(list)
    whole = 0
    for grant in grants:
        if grant.device_uuid == room.uuid:
            claim = max(0, grant.need_bytes - allocated.get(grant.id, 0))
            whole += claim if grant.whole else 0
            claims[grant.user].append(0 if grant.whole else claim)
    claimed = sum(map(sum, claims.values()))
    if user is not None and room.size_bytes is not None:
        share = room.size_bytes // len({user, *users, *claims})
        claimed = sum(sum(each) if name == user else min(sum(each), max(share, *each)) for name, each in claims.items())
    return room.free_bytes - claimed - whole - room.reserved_bytes


def plan(room: Room, request: WaitingRequest, available: int | None) -> Plan:
    """Return the plan for one request."""
    if available is None:
        return Plan(None)
    if request.need_bytes <= available:
        return Plan(available)
    allowed = [each for each in room.neighbors if request.uid in (None, each.uid)]
    return reclaim_plan(allowed, request.need_bytes - available, available)


def reclaim_plan(neighbors: Iterable[Competitor], short_bytes: int, available: int) -> Plan:
    """Return the cheapest flushes that return ``short_bytes`` and, if all flushes return less, the fewest suspensions.

    A cache is cheap if its program is idle, and expensive if the program allocated flushed memory again. Among equals
    the largest is first, so that few programs are flushed.
    """
    neighbors, chosen = tuple(neighbors), list[Competitor]()
    for each in sorted(neighbors, key=_cost):
        if short_bytes <= 0:
            break
        if each.reclaimable_bytes > 0:
            chosen.append(each)
            short_bytes -= each.reclaimable_bytes
    suspended: list[Competitor] = []
    while short_bytes > 0 and (left := [each for each in neighbors if _gain(each) > 0 and each not in suspended]):
        enough = [each for each in left if _gain(each) >= short_bytes]
        suspended.append(min(enough, key=_gain) if enough else max(left, key=_gain))
        short_bytes -= _gain(suspended[-1])
    chosen = [each for each in chosen if each not in suspended]
    return Plan(available, _needed(chosen, -short_bytes), max(0, short_bytes), tuple(suspended))


def _gain(neighbor: Competitor) -> int:
    """Return what a suspension returns after a flush."""
    return neighbor.suspendable_bytes - neighbor.reclaimable_bytes


def _cost(neighbor: Competitor) -> tuple[int, bool, int, int]:
    return (neighbor.thrashes, not neighbor.idle_seconds, -neighbor.reclaimable_bytes, neighbor.process.pid)


def _needed(chosen: Sequence[Competitor], spare_bytes: int) -> tuple[Competitor, ...]:
    """Return the flushes without those that the rest makes superfluous, the most expensive of these first."""
    kept: list[Competitor] = []
    for each in reversed(chosen):
        if each.reclaimable_bytes <= spare_bytes:
            spare_bytes -= each.reclaimable_bytes
        else:
            kept.append(each)
    return tuple(reversed(kept))


@dataclass(frozen=True, slots=True)
class Started:
    """The program of a grant: its process if it is known, its user, and the memory that was granted."""

    process: ProcessKey | None
    uid: int | None
    device_uuid: str
    need_bytes: int


def allocated(snapshot: Snapshot, started: Mapping[str, Started]) -> dict[str, int]:
    """Return the bytes that the processes of each grant hold on its device. Absent: none of them is known there.

    A suspended program holds nothing until it is resumed completely: its whole grant must last until then.
    """
    found: dict[str, int] = {}
    suspended = {each.key for each in snapshot.suspended_programs}
    for name, keys in members(snapshot, started).items():
        device = snapshot.device(started[name].device_uuid)
        sizes = [0 if key in suspended else snapshot.used_by(key, device) for key in keys] if device else []
        if known := [size for size in sizes if size is not None]:
            found[name] = sum(known)
    return found


def members(snapshot: Snapshot, started: Mapping[str, Started]) -> dict[str, set[ProcessKey]]:
    """Return the processes of each grant: the one that was started, and those whose agent names the grant."""
    found: dict[str, set[ProcessKey]] = {name: {own.process} if own.process else set() for name, own in started.items()}
    for report in snapshot.reports if started else ():
        grant = started.get(report.admission)
        if grant is not None and grant.uid in (None, report.uid):
            found[report.admission].add(report.key)
    return found


def rooms(
    snapshot: Snapshot,
    started: Mapping[str, Started],
    reclaim: ReclaimPolicy,
    devices: Sequence[DeviceReading] | None = None,
) -> list[Room]:
    """Return the memory of each device, or of ``devices``. Without a current reading, the memory is unknown."""
    granted = {
        (started[name].device_uuid, key): started[name].need_bytes
        for name, keys in members(snapshot, started).items()
        for key in keys
    }
    return [_room(each, snapshot, granted, reclaim) for each in (snapshot.devices if devices is None else devices)]


def _room(
    device: DeviceReading, snapshot: Snapshot, granted: Mapping[tuple[str, ProcessKey], int], reclaim: ReclaimPolicy
) -> Room:
    reserved, holders = 0, set[int]()
    for key, unused in snapshot.unused_reserves.get(device.uuid, {}).items():
        quotas = snapshot.quotas_by_process
        own = quotas[key]
        grants = (
            need
            for (uuid, other), need in granted.items()
            if uuid == device.uuid and quotas.get(other, NO_QUOTA).reserve_quota == own.reserve_quota
        )
        ungranted = min(unused, (own.reserve_bytes or 0) - sum(grants))
        if ungranted > 0:
            reserved += ungranted
            holders |= _uids(device, key, snapshot)
    return Room(
        uuid=device.uuid,
        size_bytes=device.size_bytes,
        free_bytes=device.current_free_bytes,
        reserved_bytes=min(reserved, reserved if device.size_bytes is None else device.size_bytes),
        flushable_users=None if reclaim == "all" else frozenset(holders),
        neighbors=() if reclaim == "off" else tuple(_neighbors(device, snapshot, granted)),
    )


def _neighbors(
    device: DeviceReading, snapshot: Snapshot, granted: Mapping[tuple[str, ProcessKey], int]
) -> Iterator[Competitor]:
    for report in snapshot.reports_by_device.get(device.uuid, ()):
        if (device.uuid, report.key) in granted:
            continue
        pools = [pool for pool in report.pools if pool.device_uuid == device.uuid and pool.inside is None]
        reserve = snapshot.quotas_by_process.get(report.key, NO_QUOTA).reserve_bytes or 0
        held = snapshot.used_by(report.key, device) or 0
        cached = 0 if report.flush_policy == "never" else sum(pool.reclaimable.likely for pool in pools)
        reclaimable = min(cached, max(0, held - reserve))
        suspendable = held if not reserve and report.may_suspend else 0
        if reclaimable > 0 or suspendable > 0:
            yield _neighbor(device, report, reclaimable, sum(pool.thrashes for pool in pools), suspendable)


def _neighbor(
    device: DeviceReading, report: AgentReport, reclaimable: int, thrashes: int, suspendable: int
) -> Competitor:
    process = device.processes_by_key.get(report.key)
    return Competitor(
        process=report.key,
        uid=report.uid,
        workload=report.workload,
        reclaimable_bytes=reclaimable,
        idle_seconds=process.idle_seconds if process else None,
        thrashes=thrashes,
        suspendable_bytes=suspendable,
    )


def _uids(device: DeviceReading, key: ProcessKey, snapshot: Snapshot) -> set[int]:
    process, report = device.processes_by_key.get(key), snapshot.reports_by_process.get(key)
    uid = report.uid if report else process.uid if process else None
    return set() if uid is None else {uid}
