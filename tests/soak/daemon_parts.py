"""The daemon without its edges, on a clock that is given.

`Core.tick` puts the daemon's parts together as `Daemon.tick` does: observe, advance, consequences with the real store
and the real outbox, what the API reads, history that is kept, the page that Prometheus scrapes. What is left out is
what has a clock of its own: the driver's process, the agents' socket, HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Protocol

from gpumond.alerting.dispatcher import AlertDispatcher
from gpumond.alerting.outbox import Outbox
from gpumond.alerting.receivers import Retry
from gpumond.api.event_log import EventLog
from gpumond.baselines.service import BaselineService
from gpumond.config.rule_registry import RuleRegistry
from gpumond.engine import EngineState, Tick, advance, observe
from gpumond.engine.preview import PreviewWindow
from gpumond.errors import NoSuchRule, NoSuchTarget, StoreUnavailable
from gpumond.flush import FlushOutcome, FlushRequest
from gpumond.metrics import Exposition, Form
from gpumond.metrics.telemetry import Telemetry
from gpumond.model.frame import Alert
from gpumond.model.persisted import Heartbeat
from gpumond.model.snapshot import AgentReport, Reading, SourceState
from gpumond.rules.built_in import BUILT_IN
from gpumond.rules.config import RuleConfig
from gpumond.rules.restore import awaited
from gpumond.store import Bounds, Store
from gpumond.store.history import HistoryPersistence
from tests.soak.world import EPOCH

RULE_NAMES = 20
SCRAPE_SECONDS = 30.0
BEAT_SECONDS = 0.5


class Stage(Protocol):
    """Interface of the world that a core uses."""

    dice: Random
    elapsed: float
    wall: float
    state: SourceState
    receiver_down: bool

    def reading(self) -> Reading | None: ...
    def reports(self) -> tuple[AgentReport, ...]: ...


class Pager:
    """A receiver. ``told`` is how often it heard that something fires, and that it is over."""

    name = "pager"
    resend_seconds = None

    def __init__(self, world: Stage) -> None:
        self._world = world
        self.told = Counter[str]()

    async def send(self, raised: Sequence[Alert], resolved: Sequence[Alert]) -> None:
        await asyncio.sleep(0)
        if self._world.receiver_down:
            raise Retry("connection", "down")
        self.told.update(raised=len(raised), resolved=len(resolved))


class Core:
    """``began``: the store's monotonic clock when elapsed time was 0; without one that clock is the real one."""

    def __init__(
        self, directory: Path, world: Stage, store_bytes: int, began: float | None = None, pager: Pager | None = None
    ) -> None:
        self.world, self.pager = world, pager or Pager(world)
        clock = {} if began is None else {"clock": lambda: Heartbeat(time.time(), began + world.elapsed)}
        bounds = Bounds(max_bytes=store_bytes)
        self.store = Store(directory / "gpumond.db", bounds, beat_seconds=BEAT_SECONDS, **clock)
        self.rulebook = RuleRegistry(BUILT_IN, (), self.store, ("pager",))
        self.raised = Counter[str]()
        self.edits = self.refused_edits = self.page_bytes = 0
        self._telemetry = Telemetry()
        self._outbox = Outbox([self.pager], self.store, self._telemetry, backoff_seconds=(0.001, 0.01))
        self._consequences = AlertDispatcher(self.store, self._outbox, self._flush, began or 0.0)
        self._keeper = HistoryPersistence(self.store)
        self._hour, self._baselines, self._events = PreviewWindow(), BaselineService(self.store), EventLog(EPOCH)
        self._exposition = Exposition(self._telemetry)
        self._memory, self._snapshot = EngineState(), None  # type: tuple[Memory, Snapshot | None]

    async def open(self) -> None:
        await self.store.open()
        activities = await self._consequences.resume()
        self._memory = EngineState(activities, awaited=awaited(activities))
        await self._keeper.restore(self._memory.diagnosis.history)
        await self._outbox.open()
        try:
            await self.rulebook.load()
        except StoreUnavailable:
            pass  # the disk is full

    async def close(self) -> None:
        await self._keeper.close(self._memory.diagnosis.history)
        await self._outbox.close()
        await self.store.close()

    async def tick(self) -> Tick:
        world = self.world
        reading = world.reading()
        self._snapshot = snapshot = observe(
            self._snapshot,
            world.state,
            reading,
            world.reports(),
            world.wall,
            world.elapsed,
            self.store.writable,
            self.store.faults(),
        )
        rules = self.rulebook.rules
        tick = advance(self._memory, rules, snapshot)
        self._memory = tick.memory
        alerts = self._consequences.follow(rules, tick.frame.alerts, snapshot, tick.memory.activities, tick.resolved)
        frame = replace(tick.frame, alerts=alerts)
        self._hour.see(frame)
        self._baselines.see(frame)
        self._telemetry.workloads.connected(report.workload for report in snapshot.reports)
        self._telemetry.happened(self._events.follow(frame, tick.raised, tick.resolved))
        self._keeper.turn(self._memory.diagnosis.history, snapshot.elapsed_seconds)
        self._telemetry.faults(snapshot.faults, complete=reading is not None)
        if world.elapsed % SCRAPE_SECONDS == 0:
            self.page_bytes = len(self._exposition.page(frame, Form(False)).plain)
        self.raised.update(raised=len(tick.raised), resolved=len(tick.resolved))
        return tick

    async def edit(self) -> None:
        """Somebody makes, changes or removes a rule."""
        self.edits += 1
        name = f"rule-{self.world.dice.randrange(RULE_NAMES)}"
        level = 2.0**45 + self.edits
        try:
            if self.world.dice.random() < 0.2:
                await self.rulebook.delete(name, "soak")
            else:
                body = {"name": name, "scope": "process", "value": "used_bytes", "above": level}
                await self.rulebook.put(RuleConfig.model_validate(body), "soak")
        except NoSuchRule:
            pass
        except StoreUnavailable:
            self.refused_edits += 1

    async def settled(self) -> None:
        """Return whether all raised alerts were delivered."""
        while self.pager.told != self.raised:
            await asyncio.sleep(0.01)

    async def _flush(self, request: FlushRequest, requested_by: str) -> FlushOutcome:
        raise NoSuchTarget("no agent is asked here")
