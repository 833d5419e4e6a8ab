"""The Daemon with simulated dependencies: devices, agents, receiver and clock belong to a world; store and outbox are
real.

It has no HTTP server and no schedule: the test calls `SimulatedDaemon.tick`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Protocol

from gpumond.config.settings import Settings
from gpumond.core import Clock, Dependencies, Tick
from gpumond.daemon.daemon import Daemon
from gpumond.facts.alerts import ClockTimes
from gpumond.facts.errors import NoSuchEntry, StoreUnavailable
from gpumond.facts.frame import Alert
from gpumond.facts.messages import AgentRequest, AgentResponse, FlushCommand, FlushResult
from gpumond.facts.program import ProcessKey
from gpumond.facts.snapshot import AgentReport, CgroupLimitChange, ProcessEnd, Reading, SourceState
from gpumond.features.alerts.dispatcher import ReceiverOptions
from gpumond.features.alerts.receivers.base import TemporaryFailure
from gpumond.features.rules.registry import RuleRegistry
from gpumond.features.rules.settings import RuleConfig
from gpumond.host.peer import PeerIdentity
from gpumond.metrics.telemetry import Telemetry
from gpumond.programs.agent_server import AgentServer
from gpumond.store.store import Store, StoreLimits
from tests.helpers.world import TICK_SECONDS

RULE_NAMES = 20
SCRAPE_SECONDS = 30.0
HEARTBEAT_SECONDS = 0.5


class SimulatedWorld(Protocol):
    """The part of a world that the simulated dependencies use."""

    rng: Random
    elapsed: float
    wall: float
    state: SourceState
    receiver_down: bool
    programs: int

    def reading(self) -> Reading | None: ...
    def reports(self) -> tuple[AgentReport, ...]: ...


class SimulatedCollector:
    def __init__(self, world: SimulatedWorld) -> None:
        self._world = world

    @property
    def state(self) -> SourceState:
        return self._world.state

    def start(self) -> None:
        pass

    async def read(self, wait: float) -> Reading | None:
        return self._world.reading()

    def change_limits(self, changes: Iterable[CgroupLimitChange]) -> None:
        pass

    async def detach_for(self, seconds: float) -> bool:
        return True

    async def stop(self) -> None:
        pass


class SimulatedAgents:
    """Agents that report and answer nothing."""

    def __init__(self, world: SimulatedWorld) -> None:
        self._world = world

    def serve(self) -> None:
        pass

    def receive(self) -> None:
        pass

    def reports(self) -> tuple[AgentReport, ...]:
        return self._world.reports()

    def report(self, identity: PeerIdentity) -> AgentReport | None:
        return next((report for report in self.reports() if report.pid == identity.pid), None)

    def silent_reports(self) -> tuple[AgentReport, ...]:
        return ()

    def set_suspended(self, suspended: Collection[ProcessKey]) -> None:
        pass

    def take_ends(self) -> tuple[ProcessEnd, ...]:
        return ()

    def on_borrow(self, borrow: object) -> None:
        pass

    def take_exited_reports(self) -> tuple[AgentReport, ...]:
        return ()

    async def flush(self, identity: PeerIdentity, request: FlushCommand) -> FlushResult | None:
        return None

    async def ask(self, identity: PeerIdentity, request: AgentRequest) -> AgentResponse | None:
        return None

    def is_flushing(self, identity: PeerIdentity) -> bool:
        return False

    def close(self) -> None:
        pass


class CountingReceiver:
    """Receiver. ``received`` counts the firing and the resolved alerts that it was sent."""

    name = "receiver"
    resend_seconds = None
    batch_limit = 64

    def __init__(self, world: SimulatedWorld) -> None:
        self._world = world
        self.received = Counter[str]()

    async def send(self, raised: Sequence[Alert], resolved: Sequence[Alert]) -> None:
        await asyncio.sleep(0)
        if self._world.receiver_down:
            raise TemporaryFailure("connection", "down")
        self.received.update(raised=len(raised), resolved=len(resolved))


class SimulatedDaemon:
    """``began`` is the store's monotonic clock when elapsed time was 0; without it the store has the real clock."""

    def __init__(
        self,
        directory: Path,
        world: SimulatedWorld,
        store_bytes: int,
        began: float | None = None,
        receiver: CountingReceiver | None = None,
        agents: AgentServer | None = None,
    ) -> None:
        self.world, self.receiver = world, receiver or CountingReceiver(world)
        clock = {} if began is None else {"clock": lambda: ClockTimes(time.time(), began + world.elapsed)}
        self.store = Store(
            directory / "gpumond.db", StoreLimits(max_bytes=store_bytes), heartbeat_seconds=HEARTBEAT_SECONDS, **clock
        )
        dependencies = Dependencies(
            devices=SimulatedCollector(world),
            agents=agents or SimulatedAgents(world),
            store=self.store,
            telemetry=Telemetry(),
            clock=Clock(lambda: world.wall, lambda: (began or 0.0) + world.elapsed),
            services={ReceiverOptions: ReceiverOptions(lambda settings: [self.receiver], (0.001, 0.01))},
        )
        # A device that is really full would be one on which other programs run out of memory.
        settings = Settings(interval=TICK_SECONDS, rule_overrides={"device-nearly-full": {"threshold": 0.8}})
        self.daemon = Daemon(settings, dependencies)
        self.raised = Counter[str]()
        self.edits = self.refused_edits = self.page_bytes = 0

    @asynccontextmanager
    async def started(self) -> AsyncIterator[None]:
        async with self.daemon.started():
            yield

    async def tick(self) -> Tick:
        tick = await self.daemon.tick()
        if self.world.elapsed % SCRAPE_SECONDS == 0:
            self.page_bytes = len((await self.daemon.core.metrics("")).body)
        self.raised.update(raised=len(tick.raised), resolved=len(tick.resolved))
        return tick

    async def edit(self) -> None:
        """Make, change or remove a rule."""
        self.edits += 1
        name = f"rule-{self.world.rng.randrange(RULE_NAMES)}"
        level = 2.0**45 + self.edits
        try:
            if self.world.rng.random() < 0.2:
                await self.daemon.core.get(RuleRegistry).delete(name, "soak")
            else:
                body = {"name": name, "scope": "process", "value": "used_bytes", "above": level}
                await self.daemon.core.get(RuleRegistry).put(RuleConfig.model_validate(body).rule(), "soak")
        except NoSuchEntry:
            pass
        except StoreUnavailable:
            self.refused_edits += 1

    async def settled(self) -> None:
        """Wait until the receiver has been sent every alert."""
        while self.receiver.received != self.raised:
            await asyncio.sleep(0.01)
