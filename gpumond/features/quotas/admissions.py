"""Requests for device memory: who waits, who was granted, and the flushes that make room.

``engine.admission`` decides; this module keeps the queue, also in the store, and carries out its plans.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from math import isfinite

from gpumond.facts.alerts import KeptAdmission
from gpumond.facts.errors import FlushError, NoSuchAdmission, StoreUnavailable, TooManyAdmissions
from gpumond.facts.flush import FlushOutcome, FlushRequest, Target
from gpumond.facts.process import ProcessKey
from gpumond.facts.quota import Admission, PlannedFlush, ReclaimPolicy
from gpumond.facts.snapshot import DeviceReading, Snapshot
from gpumond.facts.units import human
from gpumond.features.quotas.queue import (
    Decision,
    Grant,
    Plan,
    Queue,
    Started,
    WaitingRequest,
    allocated,
    available_bytes,
    decide,
    in_turn,
    plan,
    rooms,
)
from gpumond.host.peer import counted_name
from gpumond.kernel import Grants
from gpumond.store.table import Table, Transactions

log = logging.getLogger(__name__)

LEASE_SECONDS = 10.0
"""Time after which a request that is not renewed loses its place."""
GRANT_SECONDS = 120.0
"""Time to allocate the memory, for a program whose process is unknown."""
PROCESS_GRANT_SECONDS = 600.0
"""The same for a known process. The end of the process ends its grant."""
LEAST_GRANT_SECONDS = 10.0
"""A grant that its program does not use halves the time of the user's next ones, down to this."""
HOLD_SECONDS = 120.0
"""Time for which a request keeps those of other users back, while flushes or the end of grants make room for it."""
PER_OWNER, IN_TOTAL = 16, 256
"""Limits of requests, granted ones included."""
PAUSE_SECONDS = 5.0
"""Time between two flushes for one device. It doubles while they do not suffice."""
MAX_PAUSE_SECONDS = 600.0

RESERVE = "reserve"
"""The requester of flushes for the reserve of a quota."""


@dataclass(slots=True, kw_only=True)
class _Entry:
    owner: str
    started: Started
    request: WaitingRequest
    device_index: int
    leased_until: float
    granted: bool = False
    held_from: float | None = None
    """Time from which it has kept others back."""


@dataclass(slots=True)
class _Pause:
    until: float = 0.0
    seconds: float = PAUSE_SECONDS


def admission_table(store: Transactions) -> Table[KeptAdmission]:
    """Return the store's table of requests."""
    return Table(store, "admissions", KeptAdmission, key="id", valid=_is_request)


def _is_request(kept: KeptAdmission) -> bool:
    return kept.need_bytes >= 1 and all(map(isfinite, (kept.grant_seconds, kept.deadline or 0.0)))


class Admissions(Grants):
    """Requests of one daemon. ``reclaim`` returns the current setting; ``find`` a process by its pid, with its uid.
    ``suspend`` suspends an idle program for the requester that it names.

    ``clock`` returns seconds of the machine's monotonic clock, which continue when the daemon restarts. After a change,
    call `keep` before the requester is answered.
    """

    def __init__(
        self,
        flush: Callable[[FlushRequest, str], Awaitable[FlushOutcome]],
        reclaim: Callable[[], ReclaimPolicy],
        find: Callable[[int], tuple[ProcessKey, int] | None],
        clock: Callable[[], float],
        store: Transactions,
        suspend: Callable[[ProcessKey, str], Awaitable[object]] | None = None,
    ) -> None:
        self._flush, self._reclaim, self._find, self._clock = flush, reclaim, find, clock
        self._suspend = suspend
        self._table = admission_table(store)
        self.loaded = False
        self._writing = asyncio.Lock()
        self._kept: Queue | None = None
        """The queue that the store contains; None if that is unknown."""
        self._keeping: asyncio.Task[bool] | None = None
        self._queue = Queue()
        self._entries: dict[str, _Entry] = {}
        self._pauses: dict[str, _Pause] = {}
        self._lent_to: dict[str, str] = {}
        self._unused: dict[str, tuple[int, int]] = {}
        """By user: the number of grants that lapsed unused since one was used, and the largest of them in bytes."""
        self._flushing: dict[str, asyncio.Task[None]] = {}
        self._decision = Decision(Queue())

    async def load(self) -> list[str]:
        """Restore the requests of the previous daemon, before those that were made since. Raises StoreUnavailable."""
        now = self._clock()
        entries: dict[str, _Entry] = {}
        grants: list[Grant] = []
        for row in await self._table.rows():
            each = row.value
            process = None if each.pid is None else ProcessKey(each.pid, each.start_ticks)
            request = WaitingRequest(
                id=each.id,
                device_uuid=each.device_uuid,
                need_bytes=each.need_bytes,
                grant_seconds=each.grant_seconds,
                uid=each.uid,
                user=counted_name(each.owner),
                whole=each.whole,
            )
            entries[each.id] = _Entry(
                owner=each.owner,
                started=Started(process, each.program_uid, each.device_uuid, each.need_bytes),
                request=request,
                device_index=each.device_index,
                leased_until=now + LEASE_SECONDS,
                granted=each.deadline is not None,
            )
            if each.deadline is not None:  # of another clock, if the machine was started again
                deadline = min(each.deadline, now + each.grant_seconds)
                grants.append(Grant(each.id, each.device_uuid, each.need_bytes, deadline, request.user, each.whole))
        waiting = tuple(entry.request for entry in entries.values() if not entry.granted)
        self._entries = entries | self._entries
        self._queue = Queue((*waiting, *self._queue.waiting), (*grants, *self._queue.grants))
        self.loaded = True
        return []

    async def keep(self) -> bool:
        """Store the requests if they have changed. Return False if they are in memory only."""
        async with self._writing:
            queue = self._queue
            if self.loaded and queue != self._kept:
                try:
                    await self._table.replace(self._requests())
                except StoreUnavailable:
                    return False  # the store has logged it; the next tick tries again
                self._kept = queue
            return self.loaded

    def _requests(self) -> tuple[KeptAdmission, ...]:
        deadlines = {grant.id: grant.deadline for grant in self._queue.grants}
        return tuple(
            KeptAdmission(
                id=name,
                owner=entry.owner,
                device_uuid=entry.request.device_uuid,
                device_index=entry.device_index,
                need_bytes=entry.request.need_bytes,
                grant_seconds=entry.request.grant_seconds,
                uid=entry.request.uid,
                pid=entry.started.process.pid if entry.started.process else None,
                start_ticks=entry.started.process.start_ticks if entry.started.process else None,
                program_uid=entry.started.uid,
                deadline=deadlines.get(name),
                whole=entry.request.whole,
            )
            for name, entry in self._entries.items()
        )

    def request(
        self,
        snapshot: Snapshot,
        device: DeviceReading,
        need_bytes: int,
        owner: str,
        *,
        uid: int | None = None,
        pid: int | None = None,
        wait: bool = False,
        whole: bool = False,
    ) -> Admission:
        """Grant a request, or queue it if it waits. Raises TooManyAdmissions.

        ``uid``: the user that makes the request; None for an administrator. ``pid``: the process that becomes the
        program; one of another user is ignored, since a client may have stated any. ``whole``: see Grant.
        """
        self._expire()
        user = counted_name(owner)
        own = sum(entry.request.user == user for entry in self._entries.values())
        if own >= PER_OWNER or len(self._entries) >= IN_TOTAL:
            limit = f"{PER_OWNER} requests of one user" if own >= PER_OWNER else f"{IN_TOTAL} requests"
            raise TooManyAdmissions(f"the limit of {limit} for memory is reached; wait until a program has started")
        name, now = uuid.uuid4().hex, self._clock()
        found = self._find(pid) if pid is not None else None
        process, owner_uid = found if found and uid in (None, found[1]) else (None, uid)
        request = WaitingRequest(
            id=name,
            device_uuid=device.uuid,
            need_bytes=need_bytes,
            grant_seconds=self._grant_seconds(user, PROCESS_GRANT_SECONDS if process else GRANT_SECONDS),
            uid=uid if self._reclaim() == "user" else None,
            user=user,
            whole=whole,
        )
        started = Started(process, owner_uid, device.uuid, need_bytes)
        leased_until = now + LEASE_SECONDS
        entry = _Entry(
            owner=owner, started=started, request=request, device_index=device.index, leased_until=leased_until
        )
        self._entries[name] = entry
        self._queue = Queue((*self._queue.waiting, request), self._queue.grants)
        self._decide(snapshot)
        answer = self._answer(snapshot, name, entry)
        if not entry.granted and not wait:
            self._remove(name)
            return replace(answer, state="refused")
        return answer

    def renew(self, snapshot: Snapshot | None, name: str, owner: str) -> Admission:
        """Keep the place of a request, and return its state, without a plan before the first snapshot.

        Raises NoSuchAdmission.
        """
        self._expire()
        entry = self._entry(name, owner)
        entry.leased_until = self._clock() + LEASE_SECONDS
        return self._answer(snapshot, name, entry)

    def cancel(self, name: str, owner: str) -> None:
        """Remove a request, or release what it was granted. Raises NoSuchAdmission."""
        self._entry(name, owner)
        self._remove(name)

    def extend(self, name: str, owner: str) -> None:
        """Give a grant its whole time again when half of it has passed. Raises NoSuchAdmission."""
        self._entry(name, owner)
        deadline = self._clock() + PROCESS_GRANT_SECONDS
        self._queue = Queue(
            self._queue.waiting,
            tuple(
                replace(grant, deadline=deadline)
                if grant.id == name and deadline - grant.deadline > PROCESS_GRANT_SECONDS / 2
                else grant
                for grant in self._queue.grants
            ),
        )

    def execute(self, snapshot: Snapshot) -> None:
        """Decide on a new snapshot, and start the flushes that are due; waits for none of them."""
        if self._entries or any(each.quota.reserve_bytes for each in snapshot.quotas):
            self._expire()
            self._decide(snapshot)
            short = {self._device_of(key) for key in self._decision.plans}
            self._pauses = {device: pause for device, pause in self._pauses.items() if device in short}
            for key, found in self._decision.plans.items():
                own = key in self._entries
                due = not own or (key in self._decision.holders and not found.missing_bytes)
                if due and (found.flushes or (found.suspensions and not found.missing_bytes)):
                    self._reclaim_for(key, found)
        else:
            self._pauses.clear()
        if self.loaded and self._queue != self._kept and (self._keeping is None or self._keeping.done()):
            self._keeping = asyncio.create_task(self.keep())

    async def close(self) -> None:
        tasks = list(self._flushing.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.keep()

    def _decide(self, snapshot: Snapshot) -> None:
        started = {grant.id: self._entries[grant.id].started for grant in self._queue.grants}
        ended = {name for name, own in started.items() if own.process and not self._is_alive(own.process)}
        concerned = {request.device_uuid for request in self._queue.waiting} | snapshot.unused_reserves.keys()
        devices = [device for device in snapshot.devices if device.uuid in concerned]
        own_rooms = rooms(snapshot, started, self._reclaim(), devices)
        held, now = allocated(snapshot, started), self._clock()
        self._count_unused(held, now)
        times = {name: entry.held_from for name, entry in self._entries.items() if entry.held_from is not None}
        passed = {name for name, since in times.items() if now - since >= HOLD_SECONDS}
        self._decision = decide(self._queue, own_rooms, held, ended, now, passed)
        self._queue = self._decision.queue
        for name in self._decision.holders:
            self._entries[name].held_from = times.get(name, now)
        for request in self._decision.granted:
            self._entries[request.id].granted = True
        current = {grant.id for grant in self._queue.grants}
        for name in [name for name, entry in self._entries.items() if entry.granted and name not in current]:
            del self._entries[name]

    def _grant_seconds(self, user: str, seconds: float) -> float:
        times, _ = self._unused.get(user, (0, 0))
        return max(LEAST_GRANT_SECONDS, seconds / 2.0 ** min(times, 10))

    def _count_unused(self, held: Mapping[str, int], now: float) -> None:
        """Note which grants were used, and which have lapsed with less than half of their memory allocated."""
        for grant in self._queue.grants:
            times, largest = self._unused.get(grant.user, (0, 0))
            if held.get(grant.id, 0) >= grant.need_bytes >= largest:
                self._unused.pop(grant.user, None)
            elif now >= grant.deadline and 2 * held.get(grant.id, 0) < grant.need_bytes:
                self._unused[grant.user] = times + 1, max(largest, grant.need_bytes)

    def _is_alive(self, process: ProcessKey) -> bool:
        found = self._find(process.pid)
        return found is not None and found[0] == process

    def _answer(self, snapshot: Snapshot | None, name: str, entry: _Entry) -> Admission:
        device, index, need = entry.request.device_uuid, entry.device_index, entry.request.need_bytes
        if entry.granted:
            return Admission(id=name, state="granted", device_uuid=device, device_index=index, need_bytes=need)
        ahead = self._ahead(name, device)
        found = self._decision.plans.get(name) or self._plan_behind(snapshot, entry.request, ahead)
        return Admission(
            id=name,
            state="waiting",
            device_uuid=device,
            device_index=index,
            need_bytes=need,
            ahead=len(ahead),
            available_bytes=found.available_bytes,
            missing_bytes=found.missing_bytes,
            plan=tuple(
                PlannedFlush(
                    pid=each.process.pid,
                    start_ticks=each.process.start_ticks,
                    workload=each.workload,
                    reclaimable_bytes=each.reclaimable_bytes,
                )
                for each in found.flushes
            )
            + tuple(
                PlannedFlush(
                    pid=each.process.pid,
                    start_ticks=each.process.start_ticks,
                    workload=each.workload,
                    reclaimable_bytes=each.suspendable_bytes,
                    method="suspend",
                )
                for each in found.suspensions
            ),
        )

    def _plan_behind(self, snapshot: Snapshot | None, request: WaitingRequest, ahead: list[WaitingRequest]) -> Plan:
        """Return the plan of a request behind others, whose memory counts as used."""
        device = snapshot.device(request.device_uuid) if snapshot else None
        if snapshot is None or device is None:
            return Plan(None)
        started = {grant.id: self._entries[grant.id].started for grant in self._queue.grants}
        (room,) = rooms(snapshot, started, self._reclaim(), (device,))
        users = {each.user for each in self._queue.waiting if each.device_uuid == device.uuid}
        available = available_bytes(room, self._queue.grants, allocated(snapshot, started), request.user, users)
        claimed = sum(each.need_bytes for each in ahead)
        return plan(room, request, None if available is None else available - claimed)

    def _ahead(self, name: str, device: str) -> list[WaitingRequest]:
        order = in_turn(self._queue.waiting, self._queue.grants, device)
        return order[: [each.id for each in order].index(name)]

    def _reclaim_for(self, key: str, found: Plan) -> None:
        device, now = self._device_of(key), self._clock()
        pause = self._pauses.setdefault(device, _Pause())
        if self._lent_to.get(device) != key:
            pause.seconds = PAUSE_SECONDS
        if device in self._flushing or now < pause.until:
            return
        self._lent_to[device] = key
        pause.until = now + pause.seconds
        pause.seconds = min(MAX_PAUSE_SECONDS, 2 * pause.seconds)
        entry = self._entries.get(key)
        actor = entry.owner if entry else RESERVE
        task = asyncio.create_task(self._carry_out(device, found, actor))
        self._flushing[device] = task
        task.add_done_callback(lambda _: self._flushing.pop(device, None))

    async def _carry_out(self, device: str, found: Plan, actor: str) -> None:
        if found.missing_bytes:
            log.warning("the reserves of quotas on %s lack %s, even after flushes", device, human(found.missing_bytes))
        targets = [Target(pid=each.process.pid, start_ticks=each.process.start_ticks) for each in found.flushes]
        requests: list[Awaitable[object]] = [
            self._flush(FlushRequest(target=target, by_rule=True), actor) for target in targets
        ]
        if self._suspend is not None and not found.missing_bytes:
            requests += [self._suspend(each.process, actor) for each in found.suspensions]
        for result in await asyncio.gather(*requests, return_exceptions=True):
            if isinstance(result, BaseException) and not isinstance(result, (FlushError, StoreUnavailable)):
                raise result

    def _device_of(self, key: str) -> str:
        entry = self._entries.get(key)
        return entry.request.device_uuid if entry else key

    def _entry(self, name: str, owner: str) -> _Entry:
        entry = self._entries.get(name)
        if entry is None or entry.owner != owner:
            raise NoSuchAdmission(
                f"no request of {owner} has this id; it was not renewed in {LEASE_SECONDS:g} s, or ended"
            )
        return entry

    def _expire(self) -> None:
        now = self._clock()
        for name in [name for name, entry in self._entries.items() if not entry.granted and entry.leased_until < now]:
            self._remove(name)

    def _remove(self, name: str) -> None:
        del self._entries[name]
        self._queue = Queue(
            tuple(each for each in self._queue.waiting if each.id != name),
            tuple(each for each in self._queue.grants if each.id != name),
        )
