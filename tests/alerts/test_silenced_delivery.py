"""Silences over random outages, crashes and replacements: no silenced alert is sent, and none is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import initialize, rule

from gpumond.facts.frame import Alert
from gpumond.features.alerts.outbox import Outbox
from gpumond.store.store import Store
from tests.alerts.deliveries import Delivery, DeliveryCounts, Recorder

pytestmark = pytest.mark.slow


def name_of(alert: Alert) -> str:
    return dict(alert.labels)["alertname"]


class CheckingReceiver(Recorder):
    """Receiver that records each silenced alert that it is sent as firing."""

    def __init__(self, silenced: set[str]) -> None:
        super().__init__()
        self.silenced = silenced
        self.wrong: list[str] = []

    async def send(self, raised: Sequence[Alert], resolved: Sequence[Alert]) -> None:
        self.wrong += [name_of(alert) for alert in raised if name_of(alert) in self.silenced]
        await super().send(raised, resolved)


class SilencedDelivery(Delivery):
    @initialize()
    def begin(self) -> None:
        self.silenced: set[str] = set()
        super().begin()

    def start(self) -> None:
        if self.crashes == 0:
            self.receiver = CheckingReceiver(self.silenced)

        async def start() -> None:
            self.store = Store(Path(self.directory.name) / "state" / "gpumond.db", heartbeat_seconds=3600)
            await self.store.open()
            self.outbox = Outbox(
                [self.receiver],
                self.store,
                DeliveryCounts(),
                is_silenced=lambda alert: name_of(alert) in self.silenced,
                backoff_seconds=(0.0, 0.0),
            )
            await self.outbox.open()

        self.loop.run_until_complete(start())

    @rule(name=st.sampled_from(Delivery.NAMES))
    def silence(self, name: str) -> None:
        self.silenced.add(name)
        self.tick()

    @rule(name=st.sampled_from(Delivery.NAMES))
    def unsilence(self, name: str) -> None:
        self.silenced.discard(name)
        self.tick()

    def teardown(self) -> None:
        if not hasattr(self, "receiver"):
            return
        self.receiver.failing = None
        self.settle()
        assert isinstance(self.receiver, CheckingReceiver)
        assert self.receiver.wrong == []
        self.silenced.clear()
        self.tick()
        self.settle()

        async def close() -> None:
            await self.outbox.close()
            await self.store.close()

        self.loop.run_until_complete(close())
        self.loop.close()
        self.directory.cleanup()
        for name in self.NAMES:
            received = [kind for kind, other in self.receiver.received if other == name]
            assert (received[-1:] == ["firing"]) == (name in self.firing), (received, self.firing)

    def settle(self) -> None:
        async def settle() -> None:
            (queue,) = self.outbox._queues.values()
            await asyncio.wait_for(queue.idle.wait(), 10)

        self.loop.run_until_complete(settle())


SilencedDelivery.TestCase.settings = settings(max_examples=60, stateful_step_count=25)
TestSilencedDelivery = SilencedDelivery.TestCase
