"""Queues of notifications: one bounded queue and one worker for each receiver.

``put`` compares the firing alerts with those that a receiver will know once its queue is empty, and queues the
difference. So no notification is repeated without need, no alert is resolved whose firing was not sent, and a
notification that does not fit into a full queue is queued later. The journal keeps the queue and the receivers'
knowledge over a restart; after a crash between sending and its journal entry a notification is sent twice, never lost.

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

from gpumond.facts.alerts import Labels, Notification
from gpumond.facts.errors import StoreUnavailable
from gpumond.facts.frame import Alert
from gpumond.facts.units import backoff_seconds
from gpumond.features.alerts.receivers.base import ReceiverType, Rejected, TemporaryFailure
from gpumond.metrics.telemetry import Telemetry
from gpumond.store.store import Store

log = logging.getLogger(__name__)

QUEUE_LIMIT = 10_000
BACKOFF_SECONDS = (1.0, 300.0)
PROMPT_SECONDS = 55.0
"""Longest pause while a firing alert waits to be sent: with the 5 s of an attempt, a receiver that answers again is
notified within a minute.
"""
KEEP_RESOLVED_SECONDS = 15 * 60.0
DRAIN_SECONDS = 0.5


class Outbox:
    """``wants(receiver, rule)`` returns True if a receiver is notified of a rule's alerts; ``silenced(alert)`` returns
    True while an alert is not sent.
    """

    def __init__(
        self,
        receivers: Iterable[ReceiverType],
        journal: Store,
        counts: Telemetry,
        *,
        wants: Callable[[str, str], bool] = lambda receiver, rule: True,
        silenced: Callable[[Alert], bool] = lambda alert: False,
        backoff_seconds: tuple[float, float] = BACKOFF_SECONDS,
        keep_resolved_seconds: float = KEEP_RESOLVED_SECONDS,
        queue_limit: int = QUEUE_LIMIT,
    ) -> None:
        self._receivers, self.journal, self.counts = tuple(receivers), journal, counts
        self._wants, self.silenced, self.backoff_seconds = wants, silenced, backoff_seconds
        self.keep_resolved_seconds, self.queue_limit = keep_resolved_seconds, queue_limit
        self._queues: dict[str, ReceiverQueue] = {}
        self._workers: dict[str, asyncio.Task[None]] = {}

    async def open(self) -> None:
        """Load the queues of the previous daemon, and start to deliver."""
        await self.configure(self._receivers)

    async def configure(self, receivers: Iterable[ReceiverType]) -> None:
        """Replace the receivers. A remaining receiver keeps its queue; the queue of a removed one is deleted."""
        given = {receiver.name: receiver for receiver in receivers}
        for name in self._queues.keys() - given.keys():
            del self._queues[name]
            self._workers.pop(name).cancel()
        try:
            notices, known = await self.journal.undelivered_notifications(given)
        except StoreUnavailable:
            notices, known = [], []
        for name in self._queues:
            self._queues[name].use(given[name])
        new = {name: ReceiverQueue(given[name], self) for name in given if name not in self._queues}
        for receiver, alert in known:
            if receiver in new:
                new[receiver].add_active(alert)
        for notice in notices:
            if notice.receiver in new:
                new[notice.receiver].enqueue(notice)
        self._queues |= new
        self._workers |= {name: asyncio.create_task(queue.deliver_forever()) for name, queue in new.items()}

    async def close(self) -> None:
        """Wait a moment for pending notifications; the journal keeps the rest."""
        idle = [asyncio.create_task(queue.idle.wait()) for queue in self._queues.values()]
        if idle:
            await asyncio.wait(idle, timeout=DRAIN_SECONDS)
        tasks = (*idle, *self._workers.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def put(self, alerts: Iterable[Alert], news: Mapping[Labels, Alert] | None = None) -> list[Notification]:
        """Return the new notifications for these firing alerts; the caller stores them with the alerts' state.

        ``news`` has alerts with new annotations: a firing one is sent again, another is resolved with them.
        """
        firing = {alert.labels: alert for alert in alerts if alert.phase == "firing"}
        now = time.time()
        return [
            notice
            for name, queue in self._queues.items()
            for notice in queue.put(firing, partial(self._wants, name), news or {}, now)
        ]


class ReceiverQueue:
    """Queue of one receiver, the alerts that it knows, and those that are sent again."""

    def __init__(self, receiver: ReceiverType, outbox: Outbox) -> None:
        self.idle = asyncio.Event()
        self.idle.set()
        self._receiver, self._outbox, self._counts, self._limit = receiver, outbox, outbox.counts, outbox.queue_limit
        self._queue: deque[Notification] = deque()
        self._seq = 0
        self._full = False
        self._known: dict[Labels, Alert] = {}
        self._will_know: dict[Labels, Alert] = {}
        self._firing: Mapping[Labels, Alert] = {}
        self._resolved: dict[Labels, tuple[Alert, float]] = {}
        self._news = asyncio.Event()
        self._changed = asyncio.Event()
        self._resend_at = time.monotonic()

    def use(self, receiver: ReceiverType) -> None:
        """Replace the receiver. Its address or secret may have changed, so the present pause ends."""
        self._receiver = receiver
        self._news.set()
        self._changed.set()

    def add_active(self, alert: Alert) -> None:
        """Add a firing alert that the receiver knows from an earlier run."""
        self._known[alert.labels] = self._will_know[alert.labels] = alert

    def enqueue(self, notice: Notification) -> None:
        self._queue.append(notice)
        self._seq = max(self._seq, notice.seq)
        if notice.kind == "raised":
            self._will_know[notice.alert.labels] = notice.alert
        else:
            self._will_know.pop(notice.alert.labels, None)
        self.idle.clear()
        self._news.set()

    def put(
        self, firing: Mapping[Labels, Alert], wants: Callable[[str], bool], news: Mapping[Labels, Alert], now: float
    ) -> list[Notification]:
        before, self._firing = len(self._queue), firing
        for labels, alert in firing.items():
            news_of_it = labels in news or labels not in self._will_know
            if news_of_it and wants(alert.rule) and not self._outbox.silenced(alert):
                self._offer("raised", alert)
        if self._will_know.keys() - firing.keys():
            for labels, alert in list(self._will_know.items()):
                if labels not in firing:
                    self._offer("resolved", replace(news.get(labels, alert), resolved_at=now))
        new = len(self._queue) - before
        return list(self._queue)[-new:] if new else []

    def _offer(self, kind: str, alert: Alert) -> None:
        if len(self._queue) >= self._limit:
            if not self._full:
                log.error("receiver %s: the queue is full; further notifications wait", self._receiver.name)
                self._counts.count_failed_notification(self._receiver.name, "queue_full")
            self._full = True
            return
        self.enqueue(
            Notification(self._receiver.name, self._seq + 1, "raised" if kind == "raised" else "resolved", alert)
        )

    async def deliver_forever(self) -> None:
        failures = 0
        while True:
            await self._work_to_do()
            batch = self._batch()
            if batch and self._is_silenced(batch[0]):
                await self._remove_batch(batch, accepted=False)
                self._allow_again(batch)
                continue
            after = 0.0
            try:
                await self._send(batch)
                failures = 0
                continue
            except Rejected as error:
                self._count_failure(error.reason, f"{error}; it won't be sent again")
                self._sent_now()
                await self._remove_batch(batch, accepted=False)
                continue
            except TemporaryFailure as error:
                after, text = error.after_seconds, str(error)
                reason = error.reason
            except Exception as error:
                log.exception("receiver %s", self._receiver.name)
                reason, text = "error", type(error).__name__
            failures += 1
            wait = max(after, self._pause(failures))
            self._count_failure(reason, f"{text}; next attempt in {wait:.0f} s")
            await _wait_at_most(self._changed.wait(), wait)
            self._changed.clear()

    async def _work_to_do(self) -> None:
        if self._queue:
            return
        self.idle.set()
        self._news.clear()
        await _wait_at_most(self._news.wait(), self._until_resend())

    def _until_resend(self) -> float | None:
        if self._receiver.resend_seconds is None:
            return None
        return max(0.0, self._resend_at - time.monotonic())

    def _batch(self) -> list[Notification]:
        """Return the oldest notifications, each alert at most once: firing and resolved are sent separately.

        Either all or none of them are silenced.
        """
        batch: dict[Labels, Notification] = {}
        quiet = bool(self._queue) and self._is_silenced(self._queue[0])
        for notice in self._queue:
            full = len(batch) == self._receiver.batch_limit
            if full or notice.alert.labels in batch or self._is_silenced(notice) != quiet:
                break
            batch[notice.alert.labels] = notice
        return list(batch.values())

    async def _send(self, batch: Sequence[Notification]) -> None:
        raised = {each.alert.labels: each.alert for each in batch if each.kind == "raised"}
        resolved = {
            each.alert.labels: each.alert
            for each in batch
            if each.kind == "resolved" and each.alert.labels in self._known
        }
        due = self._until_resend() == 0.0
        if due:
            raised, resolved = self._firing_again(batch) | raised, self._resolved_again(batch) | resolved
        if raised or resolved:
            await self._receiver.send(tuple(raised.values()), tuple(resolved.values()))
            self._counts.count_notification(self._receiver.name)
        if due:
            self._sent_now()
        await self._remove_batch(batch, accepted=True)

    def _sent_now(self) -> None:
        self._resend_at = time.monotonic() + (self._receiver.resend_seconds or 0.0)

    def _firing_again(self, batch: Sequence[Notification]) -> dict[Labels, Alert]:
        """Return the present state of known alerts that still fire and are not silenced."""
        other = {each.alert.labels for each in batch}
        firing = (self._firing[labels] for labels in self._known if labels in self._firing and labels not in other)
        return {alert.labels: alert for alert in firing if not self._outbox.silenced(alert)}

    def _resolved_again(self, batch: Sequence[Notification]) -> dict[Labels, Alert]:
        now, other = time.monotonic(), {each.alert.labels for each in batch}
        self._resolved = {labels: (alert, until) for labels, (alert, until) in self._resolved.items() if until > now}
        return {labels: alert for labels, (alert, _) in self._resolved.items() if labels not in other}

    async def _remove_batch(self, batch: Sequence[Notification], accepted: bool) -> None:
        """Remove the batch from the queue; ``accepted`` if its receiver accepted it."""
        for notice in batch:
            self._queue.popleft()
            labels = notice.alert.labels
            if notice.kind == "raised":
                self._resolved.pop(labels, None)
                if accepted:
                    self._known[labels] = notice.alert
            elif self._known.pop(labels, None) and accepted and self._receiver.resend_seconds is not None:
                self._resolved[labels] = (notice.alert, time.monotonic() + self._outbox.keep_resolved_seconds)
        if len(self._queue) < self._limit // 2:
            self._full = False
        if batch:
            try:
                await self._outbox.journal.record_delivery(batch, accepted)
            except StoreUnavailable:
                pass  # the store logs it; after a crash now, the notification is sent twice

    def _is_silenced(self, notice: Notification) -> bool:
        return notice.kind == "raised" and self._outbox.silenced(notice.alert)

    def _allow_again(self, batch: Sequence[Notification]) -> None:
        """Let ``put`` queue these silenced alerts later, unless another notification of them is in the queue."""
        queued = {notice.alert.labels for notice in self._queue}
        for labels in {notice.alert.labels for notice in batch} - queued - self._known.keys():
            self._will_know.pop(labels, None)

    def _pause(self, failures: int) -> float:
        """Return a random pause between the minimum and a maximum that doubles with each failure (full jitter)."""
        least, most = self._outbox.backoff_seconds
        if any(notice.kind == "raised" for notice in self._queue):
            most = min(most, PROMPT_SECONDS)
        if (resend := self._receiver.resend_seconds) is not None:
            most = min(most, resend, PROMPT_SECONDS)  # the receiver drops alerts that are not sent again
        return random.uniform(least, max(least, backoff_seconds(least, failures, most)))

    def _count_failure(self, reason: str, text: str) -> None:
        self._counts.count_notification(self._receiver.name)
        self._counts.count_failed_notification(self._receiver.name, reason)
        log.warning("receiver %s: %s", self._receiver.name, text)


async def _wait_at_most(coming: Awaitable[object], seconds: float | None) -> None:
    """Wait for ``coming`` for at most ``seconds``."""
    try:
        await asyncio.wait_for(coming, seconds)
    except (asyncio.TimeoutError, TimeoutError):
        pass
