"""Requests for device memory: who waits, who was granted, and the flushes that make room.

``decide`` concludes without I/O; `Admissions` keeps the queue, also in the store, and carries out its plans.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Literal

from gpumond.facts.errors import FlushError, NoSuchEntry, StoreUnavailable, TooManyAdmissions
from gpumond.facts.flush import FlushRequest, FlushResponse, Target
from gpumond.facts.program import ProcessKey
from gpumond.facts.quota import (
    MAX_SHOWN_EARLIER,
    NO_QUOTA,
    Admission,
    EarlierRequest,
    GrantedRequest,
    PlannedFlush,
    QueuedRequest,
    ReclaimPolicy,
    StoredAdmission,
)
from gpumond.facts.snapshot import DeviceReading, Snapshot
from gpumond.facts.units import size_text
from gpumond.host.peer import rate_limit_name
from gpumond.store.table import Table, Transactions


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbor:
    """A program on the device that may be flushed or suspended. ``refilled_flushes``: how often it allocated flushed
    memory again. ``suspendable_bytes``: what its suspension returns, its cache included; 0 if it may not be suspended
    now.
    """

    process: ProcessKey
    uid: int
    workload: str
    reclaimable_bytes: int
    idle_seconds: float | None = None
    refilled_flushes: int = 0
    suspendable_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCapacity:
    """Memory of one device. ``free_bytes`` is None if unknown.

    ``unused_reserve_bytes``: the part of quotas' reserves that their programs do not use. ``flushable_users``: the
    users whose programs may be flushed for them; None for all users.
    """

    uuid: str
    size_bytes: int | None
    free_bytes: int | None
    unused_reserve_bytes: int = 0
    flushable_users: frozenset[int] | None = None
    neighbors: tuple[Neighbor, ...] = ()


@dataclass(frozen=True, slots=True)
class AdmissionPlan:
    """The flushes and suspensions after which a request fits; none if ``missing_bytes`` are missing even then.

    ``claimed_bytes``: what earlier requests claim, and ``available_bytes`` leaves out.
    """

    available_bytes: int | None
    flushes: tuple[Neighbor, ...] = ()
    missing_bytes: int = 0
    suspensions: tuple[Neighbor, ...] = ()
    claimed_bytes: int = 0

    @property
    def fits(self) -> bool:
        """True if the request fits without a flush or suspension."""
        return self.available_bytes is not None and not (self.flushes or self.suspensions or self.missing_bytes)


@dataclass(frozen=True, slots=True)
class AdmissionQueue:
    """Requests in the order of their arrival, and grants, with a deadline, whose memory is not allocated yet."""

    waiting: tuple[StoredAdmission, ...] = ()
    grants: tuple[StoredAdmission, ...] = ()

    @property
    def all(self) -> tuple[StoredAdmission, ...]:
        return *self.waiting, *self.grants

    def find(self, id: str) -> StoredAdmission | None:
        return next((each for each in self.all if each.id == id), None)

    def without(self, id: str) -> AdmissionQueue:
        waiting, grants = (tuple(each for each in part if each.id != id) for part in (self.waiting, self.grants))
        return AdmissionQueue(waiting, grants)


@dataclass(frozen=True, slots=True)
class Decision:
    """``plans``: by id, the plan of the first request of each user on a device; by UUID, that of reserves that do not
    fit. ``blocking``: the request of each device for which programs are flushed, and which blocks those of other users.
    """

    queue: AdmissionQueue
    granted: tuple[StoredAdmission, ...] = ()
    plans: Mapping[str, AdmissionPlan] = field(default_factory=dict)
    blocking: tuple[str, ...] = ()


def decide(
    queue: AdmissionQueue,
    capacities: Iterable[DeviceCapacity],
    held_bytes: Mapping[str, int],
    ended: Collection[str],
    now: float,
    overdue: Collection[str] = (),
    user_by_caller: Mapping[str, str] = {},
) -> Decision:
    """Return the requests that are granted now, and the plans of those that wait at the head of a user's queue.

    ``held_bytes``: by grant, what its program holds on its device. ``ended``: grants whose program has ended.
    ``overdue``: requests that have blocked others for long enough. ``user_by_caller``: the user of a caller whose
    queue has another name.
    """
    grants = [
        grant
        for grant in queue.grants
        if grant.id not in ended and now < (grant.deadline or 0.0) and held_bytes.get(grant.id, 0) < grant.need_bytes
    ]
    user_of = {each.id: user_by_caller.get(each.owner, each.owner) for each in queue.all}
    granted: list[StoredAdmission] = []
    plans: dict[str, AdmissionPlan] = {}
    blocking: list[str] = []
    for capacity in capacities:
        available = available_bytes(capacity, grants, held_bytes, user_of)
        if available is not None and available < 0 and capacity.unused_reserve_bytes:
            flushable_users = capacity.flushable_users
            flushable = [each for each in capacity.neighbors if flushable_users is None or each.uid in flushable_users]
            plans[capacity.uuid] = reclaim_plan(flushable, min(-available, capacity.unused_reserve_bytes), available)
        candidates: list[str] = []
        waiting_users: set[str] = set()
        requests = in_queue_order(queue.waiting, grants, capacity.uuid, user_of)
        users = {user_of[request.id] for request in requests}
        for request in requests:
            user = user_of[request.id]
            if user in waiting_users:
                continue
            available = available_bytes(capacity, grants, held_bytes, user_of, user, users)
            if available is not None and request.need_bytes <= available:
                granted.append(request)
                grants.append(replace(request, deadline=now + request.grant_seconds))
                continue
            request_plan = plans[request.id] = admission_plan(capacity, request, available)
            waiting_users.add(user)
            own_grants = [grant for grant in grants if user_of[grant.id] == user]
            own_available = available_bytes(capacity, own_grants, held_bytes, user_of)
            if available is None or own_available is None or request_plan.missing_bytes <= own_available - available:
                candidates.append(request.id)
                if request.id not in overdue:
                    break
        blocking += candidates[-1:] if candidates and candidates[-1] not in overdue else candidates[:1]
    granted_ids = {request.id for request in granted}
    waiting = tuple(request for request in queue.waiting if request.id not in granted_ids)
    return Decision(AdmissionQueue(waiting, tuple(grants)), tuple(granted), plans, tuple(blocking))


def in_queue_order(
    waiting: Iterable[StoredAdmission], grants: Iterable[StoredAdmission], device_uuid: str, user_of: Mapping[str, str]
) -> list[StoredAdmission]:
    """Return the requests for a device: the first of each user before the second of any, else by arrival.

    The grants of a user, which precede the requests, count as well. ``user_of``: the user of each request and grant.
    """
    positions = Counter(user_of[grant.id] for grant in grants if grant.device_uuid == device_uuid)
    ranked: list[tuple[int, StoredAdmission]] = []
    for request in waiting:
        if request.device_uuid == device_uuid:
            ranked.append((positions[user_of[request.id]], request))
            positions[user_of[request.id]] += 1
    return [request for _, request in sorted(ranked, key=lambda each: each[0])]


def available_bytes(
    capacity: DeviceCapacity,
    grants: Iterable[StoredAdmission],
    held_bytes: Mapping[str, int],
    user_of: Mapping[str, str],
    user: str | None = None,
    users: Collection[str] = (),
) -> int | None:
    """Return the free bytes that neither a grant nor a reserve claims; negative if these exceed the free bytes.

    For ``user``, the claims of another user are limited. ``users`` are those who wait.
    """
    if capacity.free_bytes is None:
        return None
    claims: defaultdict[str, list[int]] = defaultdict(list)
    in_full_bytes = 0
    for grant in grants:
        if grant.device_uuid == capacity.uuid:
            claim = max(0, grant.need_bytes - held_bytes.get(grant.id, 0))
            in_full_bytes += claim if grant.whole else 0
            claims[user_of[grant.id]].append(0 if grant.whole else claim)
    claimed = sum(map(sum, claims.values()))
    if user is not None and capacity.size_bytes is not None:
        share = capacity.size_bytes // len({user, *users, *claims})
        claimed = sum(sum(each) if name == user else min(sum(each), max(share, *each)) for name, each in claims.items())
    return capacity.free_bytes - claimed - in_full_bytes - capacity.unused_reserve_bytes


def admission_plan(capacity: DeviceCapacity, request: StoredAdmission, available: int | None) -> AdmissionPlan:
    """Return the plan for one request."""
    if available is None:
        return AdmissionPlan(None)
    if request.need_bytes <= available:
        return AdmissionPlan(available)
    allowed = [each for each in capacity.neighbors if request.uid in (None, each.uid)]
    return reclaim_plan(allowed, request.need_bytes - available, available)


def reclaim_plan(
    neighbors: Iterable[Neighbor], missing_bytes: int, available: int, first_uid: int | None = None
) -> AdmissionPlan:
    """Return the cheapest flushes that return ``missing_bytes`` and, if all return less, the fewest suspensions.

    A cache is cheap if its program is idle, and expensive if the program allocated flushed memory again. Among equals
    the largest is first, so few programs are flushed. The programs of the user ``first_uid`` come before all others.
    """
    neighbors, flushes = tuple(neighbors), list[Neighbor]()
    for each in sorted(neighbors, key=lambda each: (first_uid is not None and each.uid != first_uid, *_cost(each))):
        if missing_bytes <= 0:
            break
        if each.reclaimable_bytes > 0:
            flushes.append(each)
            missing_bytes -= each.reclaimable_bytes
    suspensions: list[Neighbor] = []
    while missing_bytes > 0 and (
        suspendable := [each for each in neighbors if _suspension_gain(each) > 0 and each not in suspensions]
    ):
        sufficient = [each for each in suspendable if _suspension_gain(each) >= missing_bytes]
        suspensions.append(
            min(sufficient, key=_suspension_gain) if sufficient else max(suspendable, key=_suspension_gain)
        )
        missing_bytes -= _suspension_gain(suspensions[-1])
    flushes = [each for each in flushes if each not in suspensions]
    return AdmissionPlan(
        available, _without_superfluous(flushes, -missing_bytes), max(0, missing_bytes), tuple(suspensions)
    )


def _suspension_gain(neighbor: Neighbor) -> int:
    """Return what a suspension returns after a flush."""
    return neighbor.suspendable_bytes - neighbor.reclaimable_bytes


def _cost(neighbor: Neighbor) -> tuple[int, bool, int, int]:
    return (neighbor.refilled_flushes, not neighbor.idle_seconds, -neighbor.reclaimable_bytes, neighbor.process.pid)


def _planned_flush(neighbor: Neighbor, size: int, method: Literal["flush", "suspend"]) -> PlannedFlush:
    return PlannedFlush(
        pid=neighbor.process.pid,
        start_ticks=neighbor.process.start_ticks,
        workload=neighbor.workload,
        reclaimable_bytes=size,
        method=method,
    )


def _without_superfluous(flushes: Sequence[Neighbor], spare_bytes: int) -> tuple[Neighbor, ...]:
    """Return the flushes without those that the rest makes superfluous, the most expensive of these first."""
    needed: list[Neighbor] = []
    for each in reversed(flushes):
        if each.reclaimable_bytes <= spare_bytes:
            spare_bytes -= each.reclaimable_bytes
        else:
            needed.append(each)
    return tuple(reversed(needed))


def held_bytes_by_grant(snapshot: Snapshot, grants: Iterable[StoredAdmission]) -> dict[str, int]:
    """Return the bytes that the processes of each grant hold on its device. Absent: none of them is known there.

    A suspended program holds nothing until it is resumed completely: its whole grant must last until then.
    """
    bytes_by_grant: dict[str, int] = {}
    suspended = {each.key for each in snapshot.suspended_programs}
    for grant, keys in grant_processes(snapshot, grants):
        device = snapshot.device(grant.device_uuid)
        sizes = [0 if key in suspended else snapshot.used_by(key, device) for key in keys] if device else []
        if known_sizes := [size for size in sizes if size is not None]:
            bytes_by_grant[grant.id] = sum(known_sizes)
    return bytes_by_grant


def grant_processes(
    snapshot: Snapshot, grants: Iterable[StoredAdmission]
) -> Iterator[tuple[StoredAdmission, set[ProcessKey]]]:
    """Yield each grant with its processes: the one that was started, and those whose agent names the grant."""
    for grant in grants:
        naming = {
            report.key
            for report in snapshot.reports
            if report.admission == grant.id and grant.program_uid in (None, report.uid)
        }
        process = process_of(grant)
        yield grant, naming | ({process} if process else set())


def process_of(request: StoredAdmission) -> ProcessKey | None:
    """Return the process that becomes the program, if it is known."""
    return None if request.pid is None else ProcessKey(request.pid, request.start_ticks)


def capacities(
    snapshot: Snapshot,
    grants: Iterable[StoredAdmission],
    reclaim: ReclaimPolicy,
    devices: Sequence[DeviceReading] | None = None,
) -> list[DeviceCapacity]:
    """Return the memory of each device, or of ``devices``. Without a current reading, the memory is unknown."""
    granted = {
        (grant.device_uuid, key): grant.need_bytes for grant, keys in grant_processes(snapshot, grants) for key in keys
    }
    return [_capacity(each, snapshot, granted, reclaim) for each in (snapshot.devices if devices is None else devices)]


def _capacity(
    device: DeviceReading, snapshot: Snapshot, granted: Mapping[tuple[str, ProcessKey], int], reclaim: ReclaimPolicy
) -> DeviceCapacity:
    unused_bytes, reserve_users = 0, set[int]()
    for key, unused in snapshot.unused_reserves.get(device.uuid, {}).items():
        quotas = snapshot.quotas_by_process
        quota = quotas[key]
        grants = (
            need
            for (uuid, other), need in granted.items()
            if uuid == device.uuid and quotas.get(other, NO_QUOTA).reserve_quota == quota.reserve_quota
        )
        ungranted = min(unused, (quota.reserve_bytes or 0) - sum(grants))
        if ungranted > 0:
            unused_bytes += ungranted
            reserve_users |= _user_ids(device, key, snapshot)
    return DeviceCapacity(
        uuid=device.uuid,
        size_bytes=device.size_bytes,
        free_bytes=device.current_free_bytes,
        unused_reserve_bytes=min(unused_bytes, unused_bytes if device.size_bytes is None else device.size_bytes),
        flushable_users=None if reclaim == "all" else frozenset(reserve_users),
        neighbors=() if reclaim == "off" else tuple(_neighbors(device, snapshot, granted)),
    )


def _neighbors(
    device: DeviceReading, snapshot: Snapshot, granted: Mapping[tuple[str, ProcessKey], int]
) -> Iterator[Neighbor]:
    for report in snapshot.reports_by_device.get(device.uuid, ()):
        if (device.uuid, report.key) in granted:
            continue
        pools = [pool for pool in report.pools if pool.device_uuid == device.uuid and pool.inside is None]
        reclaimable = 0 if report.flush_policy == "never" else snapshot.reclaimable_from(report, device)
        reserve = snapshot.quotas_by_process.get(report.key, NO_QUOTA).reserve_bytes
        suspendable = 0 if reserve or not report.may_suspend else snapshot.used_by(report.key, device) or 0
        if reclaimable > 0 or suspendable > 0:
            process = device.processes_by_key.get(report.key)
            yield Neighbor(
                process=report.key,
                uid=report.uid,
                workload=report.workload,
                reclaimable_bytes=reclaimable,
                idle_seconds=process.idle_seconds if process else None,
                refilled_flushes=sum(pool.refilled_flushes for pool in pools),
                suspendable_bytes=suspendable,
            )


def _user_of(request: StoredAdmission, snapshot: Snapshot) -> str | None:
    """Return the name of a program's user, if the user has a process on a device, else the uid; None if unknown."""
    uid = request.program_uid
    if uid is None:
        return None
    processes = (process for device in snapshot.devices for process in device.processes or ())
    return next((process.user for process in processes if process.uid == uid and process.user), str(uid))


def _user_ids(device: DeviceReading, key: ProcessKey, snapshot: Snapshot) -> set[int]:
    process, report = device.processes_by_key.get(key), snapshot.reports_by_process.get(key)
    uid = report.uid if report else process.uid if process else None
    return set() if uid is None else {uid}


log = logging.getLogger(__name__)

LEASE_SECONDS = 10.0
"""Time after which a request that is not renewed loses its place."""
GRANT_SECONDS = 120.0
"""Time of a grant whose process is unknown: the program allocates its memory in it."""
PROCESS_GRANT_SECONDS = 600.0
"""Time of a grant whose process is known. The end of the process ends its grant, too."""
MIN_GRANT_SECONDS = 10.0
"""A grant that its program does not use halves the time of the user's next ones, down to this."""
MAX_BLOCKING_SECONDS = 120.0
"""Time for which a request blocks those of other users, while flushes or the end of grants make room for it."""
MAX_REQUESTS_PER_USER, MAX_REQUESTS = 16, 256
"""Maximum numbers of requests of a user, and of all users, granted ones included."""
FLUSH_PAUSE_SECONDS = 5.0
"""Time between two flushes for one device. It doubles while they do not suffice."""
MAX_FLUSH_PAUSE_SECONDS = 600.0

RESERVE_REQUESTER = "reserve"
"""The requester of flushes for the reserve of a quota."""


@dataclass(slots=True)
class _Pause:
    until: float = 0.0
    seconds: float = FLUSH_PAUSE_SECONDS


def admission_table(store: Transactions) -> Table[StoredAdmission]:
    """Return the store's table of requests."""
    return Table(store, "admissions", StoredAdmission, key="id", is_valid=_is_valid)


def _is_valid(request: StoredAdmission) -> bool:
    return request.need_bytes >= 1 and all(map(isfinite, (request.grant_seconds, request.deadline or 0.0)))


class Admissions:
    """Requests of one daemon. ``reclaim`` returns the current setting; ``find_process`` a process by its pid, with its
    uid. ``suspend`` suspends an idle program; it takes the requester and the program that needs the memory.

    ``clock`` returns seconds of the machine's monotonic clock, which continue when the daemon restarts. After a change,
    call `save` before the requester is answered.
    """

    def __init__(
        self,
        flush: Callable[[FlushRequest, str], Awaitable[FlushResponse]],
        reclaim: Callable[[], ReclaimPolicy],
        find_process: Callable[[int], tuple[ProcessKey, int] | None],
        clock: Callable[[], float],
        store: Transactions,
        suspend: Callable[[ProcessKey, str, str], Awaitable[object]] | None = None,
    ) -> None:
        self._flush, self._reclaim, self._find_process, self._clock = flush, reclaim, find_process, clock
        self._suspend = suspend
        self._table = admission_table(store)
        self.loaded = False
        self._save_lock = asyncio.Lock()
        self._saved: AdmissionQueue | None = None
        """The queue that the store contains; None if that is unknown."""
        self._save_task: asyncio.Task[bool] | None = None
        self._queue = AdmissionQueue()
        self._leased_until: dict[str, float] = {}
        self._blocking_since: dict[str, float] = {}
        """By id: the time from which a request has blocked others."""
        self._waiting_since: dict[str, float] = {}
        """By request that waits: Unix time of the first frame in which it does."""
        self._pauses: dict[str, _Pause] = {}
        self._flushed_plans: dict[str, str] = {}
        self._unused_grants: dict[str, tuple[int, int]] = {}
        """By user: the number of grants that lapsed unused since one was used, and the largest of them in bytes."""
        self._flush_tasks: dict[str, asyncio.Task[None]] = {}
        self._decision = Decision(AdmissionQueue())

    async def load(self) -> list[str]:
        """Restore the requests of the previous daemon, before those that were made since. Raises StoreUnavailable."""
        now = self._clock()
        stored = [row.value for row in await self._table.rows()]
        waiting = [each for each in stored if each.deadline is None]
        grants = [  # the deadline is of another clock, if the machine was started again
            replace(each, deadline=min(each.deadline, now + each.grant_seconds))
            for each in stored
            if each.deadline is not None
        ]
        self._leased_until |= dict.fromkeys((each.id for each in waiting), now + LEASE_SECONDS)
        self._queue = AdmissionQueue((*waiting, *self._queue.waiting), (*grants, *self._queue.grants))
        self.loaded = True
        return []

    async def save(self) -> bool:
        """Store the requests if they have changed. Return False if they are in memory only."""
        async with self._save_lock:
            queue = self._queue
            if self.loaded and queue != self._saved:
                try:
                    await self._table.replace(queue.all)
                except StoreUnavailable:
                    return False  # the store has logged it; the next tick tries again
                self._saved = queue
            return self.loaded

    def request(
        self,
        snapshot: Snapshot,
        device: DeviceReading,
        need_bytes: int,
        caller: str,
        *,
        uid: int | None = None,
        pid: int | None = None,
        workload: str = "",
        wait: bool = False,
        counts_in_full: bool = False,
    ) -> Admission:
        """Grant a request, or queue it if it waits. Raises TooManyAdmissions.

        ``uid``: the user that makes the request; None for an administrator. ``pid``: the process that becomes the
        program; one of another user is ignored, since a client may have stated any. ``counts_in_full``: the
        field ``whole`` of StoredAdmission.
        """
        self._expire()
        user = rate_limit_name(caller)
        own_count = sum(rate_limit_name(each.owner) == user for each in self._queue.all)
        if own_count >= MAX_REQUESTS_PER_USER or len(self._queue.all) >= MAX_REQUESTS:
            limit = (
                f"{MAX_REQUESTS_PER_USER} per user"
                if own_count >= MAX_REQUESTS_PER_USER
                else f"{MAX_REQUESTS} in total"
            )
            raise TooManyAdmissions(f"too many requests for memory ({limit}); wait until a program has started")
        known_process = self._find_process(pid) if pid is not None else None
        process, program_uid = known_process if known_process and uid in (None, known_process[1]) else (None, uid)
        request = StoredAdmission(
            id=uuid.uuid4().hex,
            owner=caller,
            device_uuid=device.uuid,
            device_index=device.index,
            need_bytes=need_bytes,
            grant_seconds=self._grant_seconds(user, PROCESS_GRANT_SECONDS if process else GRANT_SECONDS),
            uid=uid if self._reclaim() == "user" else None,
            pid=process.pid if process else None,
            start_ticks=process.start_ticks if process else None,
            program_uid=program_uid,
            deadline=None,
            whole=counts_in_full,
            workload=workload,
        )
        self._leased_until[request.id] = self._clock() + LEASE_SECONDS
        self._queue = replace(self._queue, waiting=(*self._queue.waiting, request))
        self._decide(snapshot)
        admission = self._admission(snapshot, self._queue.find(request.id) or request)
        if admission.state == "waiting" and not wait:
            self._queue = self._queue.without(request.id)
            return replace(admission, state="refused")
        return admission

    def renew(self, snapshot: Snapshot | None, request_id: str, caller: str) -> Admission:
        """Keep the place of a request and return its state, without a plan before the first snapshot.

        Raises NoSuchEntry.
        """
        self._expire()
        request = self._request_of(request_id, caller)
        self._leased_until[request_id] = self._clock() + LEASE_SECONDS
        return self._admission(snapshot, request)

    def cancel(self, request_id: str, caller: str) -> None:
        """Remove a request, or release what it was granted. Raises NoSuchEntry."""
        self._request_of(request_id, caller)
        self._queue = self._queue.without(request_id)

    def queue(self, snapshot: Snapshot) -> tuple[QueuedRequest, ...]:
        """Return the requests that wait, the next one of each device first."""
        waiting = self._queue.waiting
        self._waiting_since = {each.id: self._waiting_since.get(each.id, snapshot.taken_at) for each in waiting}
        grants = self.granted(snapshot)
        queued = [self._queued(snapshot, each, grants) for each in waiting]
        return tuple(sorted(queued, key=lambda each: (each.device_uuid, each.ahead)))

    def granted(self, snapshot: Snapshot) -> tuple[GrantedRequest, ...]:
        """Return the grants whose program doesn't hold all of its memory yet."""
        held_bytes = held_bytes_by_grant(snapshot, self._queue.grants)
        return tuple(
            GrantedRequest(
                id=grant.id,
                device_uuid=grant.device_uuid,
                need_bytes=grant.need_bytes,
                unused_bytes=grant.need_bytes - held_bytes.get(grant.id, 0),
                user=_user_of(grant, snapshot),
                workload=grant.workload,
                pid=grant.pid,
            )
            for grant in self._queue.grants
            if held_bytes.get(grant.id, 0) < grant.need_bytes
        )

    def _queued(self, snapshot: Snapshot, request: StoredAdmission, grants: Sequence[GrantedRequest]) -> QueuedRequest:
        admission = self._admission(snapshot, request)
        return QueuedRequest(
            id=request.id,
            device_uuid=admission.device_uuid,
            need_bytes=admission.need_bytes,
            available_bytes=admission.available_bytes,
            claimed_bytes=admission.claimed_bytes,
            missing_bytes=admission.missing_bytes,
            ahead=admission.ahead,
            user=_user_of(request, snapshot),
            workload=request.workload,
            pid=request.pid,
            since=self._waiting_since[request.id],
            holders=snapshot.holders(request.device_uuid, process_of(request), grants),
        )

    def extend(self, request_id: str, caller: str) -> None:
        """Give a grant its whole time again when half of it has passed. Raises NoSuchEntry."""
        self._request_of(request_id, caller)
        deadline = self._clock() + PROCESS_GRANT_SECONDS
        grants = (
            replace(grant, deadline=deadline)
            if grant.id == request_id and deadline - (grant.deadline or 0.0) > PROCESS_GRANT_SECONDS / 2
            else grant
            for grant in self._queue.grants
        )
        self._queue = replace(self._queue, grants=tuple(grants))

    def execute(self, snapshot: Snapshot) -> None:
        """Decide on a new snapshot, and start the flushes that are due; waits for none of them."""
        if self._queue != AdmissionQueue() or any(each.quota.reserve_bytes for each in snapshot.quotas):
            self._expire()
            self._decide(snapshot)
            waiting_devices = {self._device_uuid_of(key) for key in self._decision.plans}
            self._pauses = {uuid: pause for uuid, pause in self._pauses.items() if uuid in waiting_devices}
            for key, plan in self._decision.plans.items():
                is_reserve = self._queue.find(key) is None
                is_due = is_reserve or (key in self._decision.blocking and not plan.missing_bytes)
                if is_due and (plan.flushes or (plan.suspensions and not plan.missing_bytes)):
                    self._reclaim_for(key, plan)
        else:
            self._pauses.clear()
        if self.loaded and self._queue != self._saved and (self._save_task is None or self._save_task.done()):
            self._save_task = asyncio.create_task(self.save())

    async def close(self) -> None:
        tasks = list(self._flush_tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.save()

    def _decide(self, snapshot: Snapshot) -> None:
        queue, now = self._queue, self._clock()
        ended = {grant.id for grant in queue.grants if self._has_ended(grant)}
        device_uuids = {request.device_uuid for request in queue.waiting} | snapshot.unused_reserves.keys()
        devices = [device for device in snapshot.devices if device.uuid in device_uuids]
        device_capacities = capacities(snapshot, queue.grants, self._reclaim(), devices)
        held_bytes = held_bytes_by_grant(snapshot, queue.grants)
        self._count_unused_grants(held_bytes, now)
        overdue = {
            request_id for request_id, since in self._blocking_since.items() if now - since >= MAX_BLOCKING_SECONDS
        }
        user_by_caller = {each.owner: rate_limit_name(each.owner) for each in queue.all}
        self._decision = decide(queue, device_capacities, held_bytes, ended, now, overdue, user_by_caller)
        self._queue = self._decision.queue
        waiting = {each.id for each in self._queue.waiting}
        since = {request_id: self._blocking_since.get(request_id, now) for request_id in self._decision.blocking}
        self._blocking_since = {
            request_id: since for request_id, since in (self._blocking_since | since).items() if request_id in waiting
        }
        self._leased_until = {
            request_id: since for request_id, since in self._leased_until.items() if request_id in waiting
        }

    def _grant_seconds(self, user: str, seconds: float) -> float:
        count, _ = self._unused_grants.get(user, (0, 0))
        return max(MIN_GRANT_SECONDS, seconds / 2.0 ** min(count, 10))

    def _count_unused_grants(self, held_bytes: Mapping[str, int], now: float) -> None:
        """Note which grants were used, and which have lapsed with less than half of their memory allocated."""
        for grant in self._queue.grants:
            user = rate_limit_name(grant.owner)
            count, largest = self._unused_grants.get(user, (0, 0))
            if held_bytes.get(grant.id, 0) >= grant.need_bytes >= largest:
                self._unused_grants.pop(user, None)
            elif now >= (grant.deadline or 0.0) and 2 * held_bytes.get(grant.id, 0) < grant.need_bytes:
                self._unused_grants[user] = count + 1, max(largest, grant.need_bytes)

    def _has_ended(self, request: StoredAdmission) -> bool:
        """Return whether the process of a request has ended; False if it is unknown."""
        process = process_of(request)
        found = self._find_process(process.pid) if process else None
        return process is not None and (found is None or found[0] != process)

    def _admission(self, snapshot: Snapshot | None, request: StoredAdmission) -> Admission:
        admission = Admission(
            id=request.id,
            state="waiting" if request.deadline is None else "granted",
            device_uuid=request.device_uuid,
            device_index=request.device_index,
            need_bytes=request.need_bytes,
        )
        if request.deadline is not None:
            return admission
        user_of = {each.id: rate_limit_name(each.owner) for each in self._queue.all}
        requests = in_queue_order(self._queue.waiting, self._queue.grants, request.device_uuid, user_of)
        ahead = requests[: [each.id for each in requests].index(request.id)]
        plan = self._decision.plans.get(request.id) or self._plan_behind(snapshot, request, ahead, user_of)
        return replace(
            admission,
            ahead=len(ahead),
            behind=tuple(
                EarlierRequest(workload=each.workload, pid=each.pid, need_bytes=each.need_bytes)
                for each in ahead[:MAX_SHOWN_EARLIER]
            ),
            available_bytes=plan.available_bytes,
            claimed_bytes=plan.claimed_bytes,
            missing_bytes=plan.missing_bytes,
            plan=(
                *(_planned_flush(each, each.reclaimable_bytes, "flush") for each in plan.flushes),
                *(_planned_flush(each, each.suspendable_bytes, "suspend") for each in plan.suspensions),
            ),
        )

    def _plan_behind(
        self,
        snapshot: Snapshot | None,
        request: StoredAdmission,
        ahead: Sequence[StoredAdmission],
        user_of: Mapping[str, str],
    ) -> AdmissionPlan:
        """Return the plan of a request behind others, whose memory counts as used."""
        device = snapshot.device(request.device_uuid) if snapshot else None
        if snapshot is None or device is None:
            return AdmissionPlan(None)
        grants = self._queue.grants
        (capacity,) = capacities(snapshot, grants, self._reclaim(), (device,))
        users = {user_of[each.id] for each in self._queue.waiting if each.device_uuid == device.uuid}
        held_bytes = held_bytes_by_grant(snapshot, grants)
        available = available_bytes(capacity, grants, held_bytes, user_of, user_of[request.id], users)
        claimed = sum(each.need_bytes for each in ahead)
        plan = admission_plan(capacity, request, None if available is None else available - claimed)
        return replace(plan, claimed_bytes=claimed)

    def capacity_for(
        self, snapshot: Snapshot, device: DeviceReading, process: ProcessKey
    ) -> tuple[DeviceCapacity, int | None]:
        """Return a device's memory, and what of it a running process can take: its grant and reserve count for it."""
        grants = self._queue.grants
        own_grant_ids = {grant.id for grant, keys in grant_processes(snapshot, grants) if process in keys}
        (capacity,) = capacities(snapshot, grants, self._reclaim(), (device,))
        others = [grant for grant in grants if grant.id not in own_grant_ids]
        user_of = {grant.id: rate_limit_name(grant.owner) for grant in others}
        available = available_bytes(capacity, others, held_bytes_by_grant(snapshot, others), user_of)
        reserve = snapshot.unused_reserves.get(device.uuid, {}).get(process, 0)
        return capacity, None if available is None else available + min(reserve, capacity.unused_reserve_bytes)

    def _reclaim_for(self, key: str, plan: AdmissionPlan) -> None:
        uuid, now = self._device_uuid_of(key), self._clock()
        pause = self._pauses.setdefault(uuid, _Pause())
        if self._flushed_plans.get(uuid) != key:
            pause.seconds = FLUSH_PAUSE_SECONDS
        if uuid in self._flush_tasks or now < pause.until:
            return
        self._flushed_plans[uuid] = key
        pause.until = now + pause.seconds
        pause.seconds = min(MAX_FLUSH_PAUSE_SECONDS, 2 * pause.seconds)
        request = self._queue.find(key)
        task = asyncio.create_task(self._carry_out(uuid, plan, request))
        self._flush_tasks[uuid] = task
        task.add_done_callback(lambda _: self._flush_tasks.pop(uuid, None))

    async def _carry_out(self, uuid: str, plan: AdmissionPlan, request: StoredAdmission | None) -> None:
        if plan.missing_bytes:
            log.warning("reserves on %s are short of %s, even after flushes", uuid, size_text(plan.missing_bytes))
        actor, requested_for = (request.owner, request.program) if request else (RESERVE_REQUESTER, "")
        targets = [Target(pid=each.process.pid, start_ticks=each.process.start_ticks) for each in plan.flushes]
        requests: list[Awaitable[object]] = [
            self._flush(FlushRequest(target=target, by_rule=True, requested_for=requested_for), actor)
            for target in targets
        ]
        if self._suspend is not None and not plan.missing_bytes:
            requests += [self._suspend(each.process, actor, requested_for) for each in plan.suspensions]
        for result in await asyncio.gather(*requests, return_exceptions=True):
            if isinstance(result, BaseException) and not isinstance(result, (FlushError, StoreUnavailable)):
                raise result

    def _device_uuid_of(self, key: str) -> str:
        request = self._queue.find(key)
        return request.device_uuid if request else key

    def _request_of(self, request_id: str, caller: str) -> StoredAdmission:
        request = self._queue.find(request_id)
        if request is None or rate_limit_name(request.owner) != rate_limit_name(caller):
            raise NoSuchEntry(
                f"no request of {caller} has this id: either it wasn't renewed in {LEASE_SECONDS:g} s, or it ended"
            )
        return request

    def _expire(self) -> None:
        now = self._clock()
        leased = (each for each in self._queue.waiting if self._leased_until.get(each.id, 0.0) >= now)
        self._queue = replace(self._queue, waiting=tuple(each for each in leased if not self._has_ended(each)))
