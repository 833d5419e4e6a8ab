"""Alerts, receivers and stores of the tests of deliveries, and the model of a delivery."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpumond.facts.alerts import Notification
from gpumond.facts.errors import StoreUnavailable
from gpumond.facts.frame import Alert
from gpumond.features.alerts.outbox import Outbox
from gpumond.features.alerts.receivers.base import TemporaryFailure
from gpumond.store.store import Store

QUICK = (0.001, 0.002)


def make_alert(name: str = "a", phase: str = "firing") -> Alert:
    return Alert(
        rule="full",
        phase="firing" if phase == "firing" else "pending",
        labels=(("alertname", name),),
        annotations=(),
        value=1.0,
        active_at=1.0,
        fired_at=2.0,
    )


class Recorder:
    """Receiver that records its notifications. If ``failing`` is set, it raises that error instead."""

    batch_limit = 64

    def __init__(self, name: str = "receiver", resend_seconds: float | None = None) -> None:
        self.name, self.resend_seconds = name, resend_seconds
        self.received: list[tuple[str, str]] = []
        self.failing: Exception | None = None
        self.tries = 0

    async def send(self, raised: Sequence[Alert], resolved: Sequence[Alert]) -> None:
        self.tries += 1
        await asyncio.sleep(0)
        if self.failing:
            raise self.failing
        self.received += [("firing", dict(alert.labels)["alertname"]) for alert in raised]
        self.received += [("resolved", dict(alert.labels)["alertname"]) for alert in resolved]


class UnwritableStore:
    """Store that cannot be written."""

    async def undelivered_notifications(self, receivers: object) -> tuple[list[Notification], list[tuple[str, Alert]]]:
        raise StoreUnavailable("no")

    async def record_delivery(self, notices: Sequence[Notification], accepted: bool) -> None:
        raise StoreUnavailable("no")


class DeliveryCounts:
    def __init__(self) -> None:
        self.sent: list[str] = []
        self.failed: list[tuple[str, str]] = []

    def count_notification(self, receiver: str) -> None:
        self.sent.append(receiver)

    def count_failed_notification(self, receiver: str, reason: str) -> None:
        self.failed.append((receiver, reason))


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


FIRED, RESOLVED = ("firing", "a"), ("resolved", "a")


class Delivery(RuleBasedStateMachine):
    """A daemon with a real store and a receiver: alerts fire and end, the receiver fails, the daemon is killed."""

    NAMES = ("a", "b", "c")

    @initialize()
    def begin(self) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.loop = asyncio.new_event_loop()
        self.receiver = Recorder()
        self.firing: set[str] = set()
        self.expected: list[tuple[str, str]] = []
        self.crashes = 0
        self.start()

    def start(self) -> None:
        async def start() -> None:
            self.store = Store(Path(self.directory.name) / "state" / "gpumond.db", heartbeat_seconds=3600)
            await self.store.open()
            self.outbox = Outbox([self.receiver], self.store, DeliveryCounts(), backoff_seconds=(0.0, 0.0))
            await self.outbox.open()

        self.loop.run_until_complete(start())

    def tick(self) -> None:
        async def tick() -> None:
            notices = self.outbox.put([make_alert(name) for name in sorted(self.firing)])
            await self.store.store_alerts([], notices)

        self.loop.run_until_complete(tick())

    @rule(name=st.sampled_from(NAMES))
    def fire(self, name: str) -> None:
        if name not in self.firing:
            self.expected.append(("firing", name))
        self.firing.add(name)
        self.tick()

    @rule(name=st.sampled_from(NAMES))
    def end(self, name: str) -> None:
        if name in self.firing:
            self.expected.append(("resolved", name))
        self.firing.discard(name)
        self.tick()

    @rule()
    def outage(self) -> None:
        self.receiver.failing = TemporaryFailure("connection", "down")

    @rule()
    def recovery(self) -> None:
        self.receiver.failing = None

    @rule(count=st.integers(0, 12))
    def run_loop(self, count: int) -> None:
        async def run() -> None:
            for _ in range(count):
                await asyncio.sleep(0)

        self.loop.run_until_complete(run())

    @rule()
    def crash(self) -> None:
        """Cancel the work in progress, keep only what was committed, and start a new daemon."""

        async def kill() -> None:
            workers = list(self.outbox._workers.values())
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            await self.store.close()

        self.loop.run_until_complete(kill())
        self.crashes += 1
        self.start()
        self.tick()

    @precondition(lambda self: hasattr(self, "receiver"))
    @invariant()
    def resolved_alerts_were_notified_as_firing(self) -> None:
        for name in self.NAMES:
            received = [kind for kind, other in self.receiver.received if other == name]
            assert received[:1] != ["resolved"], self.receiver.received

    def teardown(self) -> None:
        if not hasattr(self, "receiver"):
            return
        self.receiver.failing = None

        async def settle() -> None:
            self.outbox.put([make_alert(name) for name in sorted(self.firing)])
            (queue,) = self.outbox._queues.values()
            await asyncio.wait_for(queue.idle.wait(), 10)
            await self.outbox.close()
            await self.store.close()

        self.loop.run_until_complete(settle())
        self.loop.close()
        self.directory.cleanup()
        for name in self.NAMES:
            expected = [kind for kind, other in self.expected if other == name]
            received = [kind for kind, other in self.receiver.received if other == name]
            assert _without_repeats(received) == expected, (received, expected)
            assert len(received) <= len(expected) + self.crashes, "at most one repeat for each crash"


def _without_repeats(kinds: list[str]) -> list[str]:
    return [kind for before, kind in zip([None, *kinds], kinds, strict=False) if kind != before]
