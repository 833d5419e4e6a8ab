"""Effects of a frame's alerts: notifications, flushes by rules, and the state kept for a restart."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Protocol

from gpumond.errors import FlushError, StoreUnavailable
from gpumond.flush import FlushOutcome, FlushRequest, Target
from gpumond.flush.receipts import blank
from gpumond.model.frame import Alert
from gpumond.model.persisted import Heartbeat, KeptAlert, Labels, Notice
from gpumond.model.pools import Receipt
from gpumond.model.snapshot import AgentReport, Snapshot
from gpumond.rules import Activities, Rule, ended
from gpumond.rules.actions import FlushOrder, Key, Tracks, annotate, conclude, decide, forget, remembered
from gpumond.rules.restore import kept, resume
from gpumond.store.audit_chain import AuditEntry

ACTION = "action"
"""The audit's word for a rule that is about to flush"""

PROGRAMS_AT_ONCE = 16
"""Maximum number of concurrent flushes of one user's programs, for one alert."""

PAST_ALERTS = 1000
"""Number of past alerts in memory; the store has more."""


class AlertStore(Protocol):
    """Methods of the store that are used; each raises StoreUnavailable."""

    writable: bool

    async def audit(self, actor: str, action: str, detail: Any) -> None: ...
    async def audit_entries(self, *, users: bool) -> list[AuditEntry]: ...
    def keep(
        self, alerts: Iterable[KeptAlert], notices: Sequence[Notice], over: Sequence[Alert]
    ) -> Awaitable[None]: ...
    async def past_alerts(self) -> list[Alert]: ...
    async def kept(self) -> tuple[list[KeptAlert], Heartbeat | None]: ...


class AlertOutbox(Protocol):
    def put(self, alerts: Iterable[Alert], news: Mapping[Labels, Alert]) -> list[Notice]: ...


class AlertDispatcher:
    """``flush`` is the only path of all flushes; ``began`` the monotonic time of elapsed 0.

    ``past`` are the alerts that fired and have ended, newest last, each with the result of its action.
    """

    def __init__(
        self,
        store: AlertStore,
        outbox: AlertOutbox,
        flush: Callable[[FlushRequest, str], Awaitable[FlushOutcome]],
        began: float,
    ) -> None:
        self._store, self._outbox, self._flush, self._began = store, outbox, flush, began
        self.past: deque[Alert] = deque(maxlen=PAST_ALERTS)
        self._ended: dict[Labels, Alert] = {}
        self._unkept: deque[Alert] = deque(maxlen=PAST_ALERTS)
        self._tracks: Tracks = {}
        self._news: dict[Labels, Alert] = {}
        self._flushing: dict[Key, Alert] = {}
        self._kept: object = None
        self._tasks: set[asyncio.Future[None]] = set()

    async def resume(self) -> Mapping[str, Activities]:
        """Return the previous daemon's alerts, and restore the recent flushes of its actions."""
        try:
            alerts, alive = await self._store.kept()
            entries = await self._store.audit_entries(users=False)
            self.past.extend(await self._store.past_alerts())
        except StoreUnavailable:
            return {}
        attempts = (_attempt(entry) for entry in entries if entry.action == ACTION)
        self._tracks = remembered([attempt for attempt in attempts if attempt], time.time())
        activities = resume(alerts, alive, time.time())
        if alive is not None and not activities:
            self._end(ended(each.alert, alive.at) for each in alerts if each.alert.phase == "firing")
        return activities

    def follow(
        self,
        rules: Sequence[Rule],
        alerts: Sequence[Alert],
        snapshot: Snapshot,
        activities: Mapping[str, Activities],
        resolved: Sequence[Alert] = (),
    ) -> tuple[Alert, ...]:
        """Start notifications, flushes and writes without waiting for them. Returns the alerts with their
        actions' results.
        """
        elapsed = snapshot.elapsed_seconds
        orders, tracks = decide(rules, alerts, snapshot.reports, self._tracks, elapsed)
        self._ended.update((alert.labels, alert) for alert in resolved)
        flushing = {alert.labels: alert for alert in self._flushing.values()}
        told = [labels for labels in self._ended if labels not in flushing]  # the others' receipts are pending
        resolved = annotate([self._ended.pop(labels) for labels in told], tracks)
        self._end(resolved)
        self._tracks = forget(tracks, alerts, elapsed)
        for order in orders:
            self._start(self._execute(order))
        alerts = annotate(alerts, self._tracks)
        news, self._news = {**self._news, **{alert.labels: alert for alert in resolved}}, {}
        later = set(flushing) - {alert.labels for alert in alerts}  # notified with its receipts soon
        notices = self._outbox.put((*alerts, *(flushing[labels] for labels in later)), news)
        state = frozenset(
            (labels, each.alert.phase, each.active_elapsed, each.cleared_elapsed, each.alert.labels)
            for active in activities.values()
            for labels, each in active.items()
        )
        if (notices or self._unkept or state != self._kept) and self._store.writable:
            over = tuple(self._unkept)
            self._unkept.clear()
            self._kept = state
            self._start(self._keep(self._store.keep(kept(activities, self._began), notices, over), over))
        return alerts

    async def _keep(self, keeping: Awaitable[None], over: Sequence[Alert]) -> None:
        try:
            await keeping
        except StoreUnavailable:
            self._kept = None  # stored again when the store is writable
            self._unkept.extendleft(reversed(over))

    def _end(self, alerts: Iterable[Alert]) -> None:
        for alert in alerts:
            self.past.append(alert)
            self._unkept.append(alert)

    async def _execute(self, order: FlushOrder) -> None:
        actor, problem = f"rule:{order.alert.rule}", ""
        receipts: list[Receipt] = []
        self._flushing[order.key] = order.alert
        slots = asyncio.Semaphore(PROGRAMS_AT_ONCE)
        try:
            if not order.action.dry_run:
                detail = {"labels": order.alert.labels, "uid": order.uid, "pids": order.pids}
                await self._store.audit(actor, ACTION, detail)
            flushed = await asyncio.gather(*(self._flush_one(order, each, actor, slots) for each in order.programs))
            receipts += (receipt for each in flushed for receipt in each)
        except StoreUnavailable as error:
            problem = str(error)
        finally:
            del self._flushing[order.key]
            self._tracks = conclude(self._tracks, order, receipts, problem)
            if order.alert.labels not in {alert.labels for alert in self._flushing.values()}:
                (self._news[order.alert.labels],) = annotate([order.alert], self._tracks)

    async def _flush_one(
        self, order: FlushOrder, program: AgentReport, actor: str, slots: asyncio.Semaphore
    ) -> Sequence[Receipt]:
        """Flush one program and return its receipts; an error is a receipt, so that it does not prevent other
        flushes.
        """
        target = Target(pid=program.pid, uid=order.uid)
        request = FlushRequest(target, order.action.steps, dry_run=order.action.dry_run, by_rule=True)
        async with slots:
            try:
                return (await self._flush(request, actor)).receipts
            except (FlushError, StoreUnavailable) as error:
                return (blank(program, "refused", str(error), actor, time.time()),)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _attempt(entry: AuditEntry) -> tuple[Key, float] | None:
    """Parse an audit entry; None if it does not name its alert, since it is damaged."""
    try:
        labels = tuple((str(name), str(text)) for name, text in entry.detail["labels"])
        uid = entry.detail.get("uid")
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return (entry.actor.removeprefix("rule:"), labels, uid if isinstance(uid, int) else None), entry.at
