"""Queues of notifications: one bounded queue and one worker for each receiver.

``put`` compares the firing alerts with those that a receiver will know once its queue is empty, and queues the
difference. So no notification is repeated without need, no alert is resolved whose firing was not sent, and a
notification that does not fit into a full queue is queued later. The store keeps the queue and the receivers'
knowledge over a restart; after a crash between sending and its record a notification is sent twice, never lost.

A silenced alert is not sent, also if it was queued before. When its silence ends and it still fires, it is queued then.
A receiver that knows a silenced alert is notified of its end.

This does *not* cover grouping and inhibition: Alertmanager does those.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from gpumond.facts.alerts import Labels, Notification, NotificationKind
from gpumond.facts.errors import StoreUnavailable
from gpumond.facts.frame import Alert
from gpumond.facts.units import backoff_seconds
from gpumond.features.alerts.receivers.base import ReceiverType, Rejected, TemporaryFailure
from gpumond.metrics.telemetry import Telemetry
from gpumond.store.store import Store

log = logging.getLogger(__name__)

QUEUE_LIMIT = 10_000
BACKOFF_SECONDS = (1.0, 300.0)
MAX_FIRING_PAUSE_SECONDS = 55.0
"""Longest pause while a firing alert waits to be sent: with the 5 s of an attempt, a receiver that answers again is
notified within a minute.
"""
RESOLVED_RESEND_SECONDS = 15 * 60.0
DRAIN_SECONDS = 0.5


class Outbox:
    """The queues of all receivers. ``wants(receiver, rule)``: whether a receiver is notified of a rule's alerts.
    ``is_silenced(alert)``: whether an alert isn't sent now.
    """

    def __init__(
        self,
        receivers: Iterable[ReceiverType],
        store: Store,
        telemetry: Telemetry,
        *,
        wants: Callable[[str, str], bool] = lambda receiver, rule: True,
        is_silenced: Callable[[Alert], bool] = lambda alert: False,
        backoff_seconds: tuple[float, float] = BACKOFF_SECONDS,
        resolved_resend_seconds: float = RESOLVED_RESEND_SECONDS,
        queue_limit: int = QUEUE_LIMIT,
    ) -> None:
        self._receivers, self.store, self.telemetry = tuple(receivers), store, telemetry
        self._wants, self.is_silenced, self.backoff_seconds = wants, is_silenced, backoff_seconds
        self.resolved_resend_seconds, self.queue_limit = resolved_resend_seconds, queue_limit
        self._queues: dict[str, ReceiverQueue] = {}
        self._workers: dict[str, asyncio.Task[None]] = {}

    async def open(self) -> None:
        """Load the queues of the previous daemon, and start to deliver."""
        await self.configure(self._receivers)

    async def configure(self, receivers: Iterable[ReceiverType]) -> None:
        """Replace the receivers. A remaining receiver keeps its queue; the queue of a removed one is deleted."""
        receivers_by_name = {receiver.name: receiver for receiver in receivers}
        for name in self._queues.keys() - receivers_by_name.keys():
            del self._queues[name]
            self._workers.pop(name).cancel()
        try:
            notices, known_alerts = await self.store.undelivered_notifications(receivers_by_name)
        except StoreUnavailable:
            notices, known_alerts = [], []
        for name in self._queues:
            self._queues[name].replace_receiver(receivers_by_name[name])
        new = {
            name: ReceiverQueue(receivers_by_name[name], self) for name in receivers_by_name if name not in self._queues
        }
        for receiver, alert in known_alerts:
            if receiver in new:
                new[receiver].add_active(alert)
        for notice in notices:
            if notice.receiver in new:
                new[notice.receiver].enqueue(notice)
        self._queues |= new
        self._workers |= {name: asyncio.create_task(queue.deliver_forever()) for name, queue in new.items()}

    async def close(self) -> None:
        """Wait a moment for pending notifications; the store keeps the rest."""
        idle = [asyncio.create_task(queue.idle.wait()) for queue in self._queues.values()]
        if idle:
            await asyncio.wait(idle, timeout=DRAIN_SECONDS)
        tasks = (*idle, *self._workers.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def put(self, alerts: Iterable[Alert], updates: Mapping[Labels, Alert] | None = None) -> list[Notification]:
        """Return the new notifications for these firing alerts; the caller stores them with the alerts' state.

        ``updates`` has alerts with new annotations: a firing one is sent again, another is resolved with them.
        """
        firing = {alert.labels: alert for alert in alerts if alert.phase == "firing"}
        now = time.time()
        return [
            notice
            for name, queue in self._queues.items()
            for notice in queue.put(firing, partial(self._wants, name), updates or {}, now)
        ]


class ReceiverQueue:
    """Queue of one receiver, the alerts that it knows, and those that are sent again."""

    def __init__(self, receiver: ReceiverType, outbox: Outbox) -> None:
        self.idle = asyncio.Event()
        self.idle.set()
        self._receiver, self._outbox = receiver, outbox
        self._telemetry, self._limit = outbox.telemetry, outbox.queue_limit
        self._queue: deque[Notification] = deque()
        self._seq = 0
        self._is_full = False
        self._known_alerts: dict[Labels, Alert] = {}
        self._alerts_known_later: dict[Labels, Alert] = {}
        self._firing: Mapping[Labels, Alert] = {}
        self._resolved_until: dict[Labels, tuple[Alert, float]] = {}
        self._has_work = asyncio.Event()
        self._receiver_changed = asyncio.Event()
        self._resend_at = time.monotonic()

    def replace_receiver(self, receiver: ReceiverType) -> None:
        """Replace the receiver. Its address or secret may have changed, so the present pause ends."""
        self._receiver = receiver
        self._has_work.set()
        self._receiver_changed.set()

    def add_active(self, alert: Alert) -> None:
        """Add a firing alert that the receiver knows from an earlier run."""
        self._known_alerts[alert.labels] = self._alerts_known_later[alert.labels] = alert

    def enqueue(self, notice: Notification) -> None:
        self._queue.append(notice)
        self._seq = max(self._seq, notice.seq)
        if notice.kind == "raised":
            self._alerts_known_later[notice.alert.labels] = notice.alert
        else:
            self._alerts_known_later.pop(notice.alert.labels, None)
        self.idle.clear()
        self._has_work.set()

    def put(
        self, firing: Mapping[Labels, Alert], wants: Callable[[str], bool], updates: Mapping[Labels, Alert], now: float
    ) -> list[Notification]:
        before, self._firing = len(self._queue), firing
        for labels, alert in firing.items():
            is_new = labels in updates or labels not in self._alerts_known_later
            if is_new and wants(alert.rule) and not self._outbox.is_silenced(alert):
                self._enqueue_if_room("raised", alert)
        if self._alerts_known_later.keys() - firing.keys():
            for labels, alert in list(self._alerts_known_later.items()):
                if labels not in firing:
                    self._enqueue_if_room("resolved", replace(updates.get(labels, alert), resolved_at=now))
        added = len(self._queue) - before
        return list(self._queue)[-added:] if added else []

    def _enqueue_if_room(self, kind: NotificationKind, alert: Alert) -> None:
        if len(self._queue) >= self._limit:
            if not self._is_full:
                log.error("receiver %s: the queue is full; further notifications wait", self._receiver.name)
                self._telemetry.count_failed_notification(self._receiver.name, "queue_full")
            self._is_full = True
            return
        self.enqueue(Notification(self._receiver.name, self._seq + 1, kind, alert))

    async def deliver_forever(self) -> None:
        failures = 0
        while True:
            await self._wait_for_work()
            batch = self._batch()
            if batch and self._is_silenced(batch[0]):
                await self._remove_batch(batch, accepted=False)
                self._allow_again(batch)
                continue
            retry_after_seconds = 0.0
            try:
                await self._send(batch)
                failures = 0
                continue
            except Rejected as error:
                self._count_failure(error.reason, f"{error}; it won't be sent again")
                self._schedule_resend()
                await self._remove_batch(batch, accepted=False)
                continue
            except TemporaryFailure as error:
                retry_after_seconds, text = error.after_seconds, str(error)
                reason = error.reason
            except Exception as error:
                log.exception("receiver %s", self._receiver.name)
                reason, text = "error", type(error).__name__
            failures += 1
            pause_seconds = max(retry_after_seconds, self._pause_seconds(failures))
            self._count_failure(reason, f"{text}; next attempt in {pause_seconds:.0f} s")
            await _wait_at_most(self._receiver_changed.wait(), pause_seconds)
            self._receiver_changed.clear()

    async def _wait_for_work(self) -> None:
        if self._queue:
            return
        self.idle.set()
        self._has_work.clear()
        await _wait_at_most(self._has_work.wait(), self._seconds_until_resend())

    def _seconds_until_resend(self) -> float | None:
        if self._receiver.resend_seconds is None:
            return None
        return max(0.0, self._resend_at - time.monotonic())

    def _batch(self) -> list[Notification]:
        """Return the oldest notifications, each alert at most once: firing and resolved are sent separately.

        Either all or none of them are silenced.
        """
        batch: dict[Labels, Notification] = {}
        is_silenced = bool(self._queue) and self._is_silenced(self._queue[0])
        for notice in self._queue:
            is_full = len(batch) == self._receiver.batch_limit
            if is_full or notice.alert.labels in batch or self._is_silenced(notice) != is_silenced:
                break
            batch[notice.alert.labels] = notice
        return list(batch.values())

    async def _send(self, batch: Sequence[Notification]) -> None:
        raised = {each.alert.labels: each.alert for each in batch if each.kind == "raised"}
        resolved = {
            each.alert.labels: each.alert
            for each in batch
            if each.kind == "resolved" and each.alert.labels in self._known_alerts
        }
        is_resend_due = self._seconds_until_resend() == 0.0
        if is_resend_due:
            raised, resolved = self._firing_to_resend(batch) | raised, self._resolved_to_resend(batch) | resolved
        if raised or resolved:
            await self._receiver.send(tuple(raised.values()), tuple(resolved.values()))
            self._telemetry.count_notification(self._receiver.name)
        if is_resend_due:
            self._schedule_resend()
        await self._remove_batch(batch, accepted=True)

    def _schedule_resend(self) -> None:
        self._resend_at = time.monotonic() + (self._receiver.resend_seconds or 0.0)

    def _firing_to_resend(self, batch: Sequence[Notification]) -> dict[Labels, Alert]:
        """Return the present state of known alerts that still fire and are not silenced."""
        in_batch = {each.alert.labels for each in batch}
        firing = (
            self._firing[labels] for labels in self._known_alerts if labels in self._firing and labels not in in_batch
        )
        return {alert.labels: alert for alert in firing if not self._outbox.is_silenced(alert)}

    def _resolved_to_resend(self, batch: Sequence[Notification]) -> dict[Labels, Alert]:
        now, in_batch = time.monotonic(), {each.alert.labels for each in batch}
        self._resolved_until = {
            labels: (alert, until) for labels, (alert, until) in self._resolved_until.items() if until > now
        }
        return {labels: alert for labels, (alert, _) in self._resolved_until.items() if labels not in in_batch}

    async def _remove_batch(self, batch: Sequence[Notification], accepted: bool) -> None:
        """Remove the batch from the queue; ``accepted`` if its receiver accepted it."""
        for notice in batch:
            self._queue.popleft()
            labels = notice.alert.labels
            if notice.kind == "raised":
                self._resolved_until.pop(labels, None)
                if accepted:
                    self._known_alerts[labels] = notice.alert
            elif self._known_alerts.pop(labels, None) and accepted and self._receiver.resend_seconds is not None:
                self._resolved_until[labels] = (notice.alert, time.monotonic() + self._outbox.resolved_resend_seconds)
        if len(self._queue) < self._limit // 2:
            self._is_full = False
        if batch:
            try:
                await self._outbox.store.record_delivery(batch, accepted)
            except StoreUnavailable:
                pass  # the store logs it; after a crash now, the notification is sent twice

    def _is_silenced(self, notice: Notification) -> bool:
        return notice.kind == "raised" and self._outbox.is_silenced(notice.alert)

    def _allow_again(self, batch: Sequence[Notification]) -> None:
        """Let ``put`` queue these silenced alerts later, unless another notification of them is in the queue."""
        queued = {notice.alert.labels for notice in self._queue}
        for labels in {notice.alert.labels for notice in batch} - queued - self._known_alerts.keys():
            self._alerts_known_later.pop(labels, None)

    def _pause_seconds(self, failures: int) -> float:
        """Return a random pause between the minimum and a maximum that doubles with each failure (full jitter)."""
        min_seconds, max_seconds = self._outbox.backoff_seconds
        if any(notice.kind == "raised" for notice in self._queue):
            max_seconds = min(max_seconds, MAX_FIRING_PAUSE_SECONDS)
        if (resend := self._receiver.resend_seconds) is not None:
            # The receiver drops alerts that are not sent again.
            max_seconds = min(max_seconds, resend, MAX_FIRING_PAUSE_SECONDS)
        return random.uniform(min_seconds, max(min_seconds, backoff_seconds(min_seconds, failures, max_seconds)))

    def _count_failure(self, reason: str, text: str) -> None:
        self._telemetry.count_notification(self._receiver.name)
        self._telemetry.count_failed_notification(self._receiver.name, reason)
        log.warning("receiver %s: %s", self._receiver.name, text)


async def _wait_at_most(coming: Awaitable[object], seconds: float | None) -> None:
    """Wait for ``coming`` for at most ``seconds``."""
    try:
        await asyncio.wait_for(coming, seconds)
    except (asyncio.TimeoutError, TimeoutError):
        pass
