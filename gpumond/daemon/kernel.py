"""The parts of a Daemon that its tick and its requests share."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from gpumond.config.settings import Compat, Settings
from gpumond.devices.child.process import Worker
from gpumond.devices.child.supervisor import Collector
from gpumond.diagnosis.diagnosis import Diagnosis
from gpumond.facts.errors import StoreUnavailable
from gpumond.facts.frame import Frame
from gpumond.facts.messages import AgentRequest, AgentResponse, FlushCommand, FlushResult
from gpumond.facts.pools import Receipt
from gpumond.facts.process import ProcessKey
from gpumond.facts.snapshot import AgentReport, Fault, ProgramEnd, Reading, SourceState
from gpumond.features.alerts.outbox import BACKOFF_SECONDS, Outbox
from gpumond.features.alerts.receivers import Notifier
from gpumond.features.baselines.recordings import BaselineService
from gpumond.features.engines.poller import Engines
from gpumond.features.flush.flusher import Flusher
from gpumond.features.quotas.registry import QuotaRegistry
from gpumond.features.rules.preview import PreviewWindow
from gpumond.features.rules.registry import RuleRegistry
from gpumond.features.silences.silences import Silences
from gpumond.host.machine import in_private_pid_namespace, kept_from_agents
from gpumond.host.peer import Identity
from gpumond.host.runtime_directory import AgentSocket
from gpumond.metrics.exposition import ALL_GROUPS, Exposition, Form, Group, Page
from gpumond.metrics.telemetry import Telemetry
from gpumond.programs.connection import Limits
from gpumond.programs.server import AgentServer
from gpumond.serve.event_log import EventLog
from gpumond.store.store import Bounds, Store
from gpumond.tick.observe import EngineState

FLUSH_READ_SECONDS = 2.0
FIRST_FRAME_SECONDS = 2.0
"""The longest that a scrape waits for the first frame: a page without devices would be a gap in each series."""


class CurrentFrame:
    """The frame that all readers use, and its metrics pages."""

    def __init__(self, edges: Edges, settings: Settings) -> None:
        self.frame: Frame | None = None
        self.answers: dict[str, bytes] = {}
        """Encoded answers of the API about this frame, by route."""
        self.exposition = Exposition(edges.telemetry, settings.compat)
        self._rendering = asyncio.Lock()
        self._swapped = asyncio.Event()

    def swap(self, frame: Frame) -> None:
        """Make ``frame`` the current one."""
        self.frame, self.answers = frame, {}
        self._swapped.set()  # wakes current waiters; later ones wait for the next frame
        self._swapped = asyncio.Event()

    async def await_frame(self, seconds: float) -> bool:
        """Wait for the next frame. Returns False if none is taken in time."""
        try:
            await asyncio.wait_for(self._swapped.wait(), seconds)
        except asyncio.TimeoutError:
            return False
        return True

    async def metrics(self, accept: str, compat: Compat | None = None, groups: frozenset[Group] = ALL_GROUPS) -> Page:
        """Return the page of the current frame. The first scrapes after the start wait for the first frame."""
        if self.frame is None:
            await self.await_frame(FIRST_FRAME_SECONDS)
        form = Form.of(accept, compat, groups)
        async with self._rendering:
            return self.exposition.page(self.frame, form)


class Parts:
    """``settings`` are replaced by a reload; ``state`` is the engine's, replaced by each tick."""

    def __init__(self, settings: Settings, edges: Edges, pace: float) -> None:
        self.settings, self.edges = settings, edges
        self.telemetry, self.store = edges.telemetry, edges.store
        self.started_at, self.began = edges.clock.wall(), edges.clock.monotonic()
        self.state = EngineState(diagnosis=Diagnosis(pace))
        self.current = CurrentFrame(edges, settings)
        names = settings.receiver_names()
        self.rulebook = RuleRegistry(
            settings.built_in_rules(), settings.rules, self.store, names, settings.rule_overrides
        )
        self.silences = Silences(self.store, edges.clock.wall)
        self.quotas = QuotaRegistry(settings.quotas, self.store.quota_rows)
        self.baselines = BaselineService(self.store)
        self.events = EventLog(self.started_at)
        self.preview_window = PreviewWindow()
        self.outbox = Outbox(
            edges.receivers(settings),
            self.store,
            self.telemetry,
            wants=self._receives,
            silenced=lambda alert: bool(self.silences.silencing(alert)),
            backoff_seconds=edges.retry_seconds,
        )
        self.flusher = Flusher(
            edges.agents,
            self._read_driver,
            done=self._flushed,
            cooldown_seconds=settings.flush_cooldown,
            engines=edges.engines,
            keep=self._keep,
        )

    def _receives(self, receiver: str, rule: str) -> bool:
        """An alert of a rule whose receivers are all unknown is sent to every receiver."""
        named = next((each.receivers for each in self.rulebook.rules if each.name == rule), ())
        return receiver in named or not set(named) & set(self.settings.receiver_names())

    def machine_names(self) -> frozenset[str]:
        """Return the names of this machine that alerts may have as `instance`, in lower case."""
        own = socket.gethostname()
        listened = () if self.settings.loopback or self.settings.host in ("0.0.0.0", "::") else (self.settings.host,)
        return frozenset(name.lower() for name in (own, own.partition(".")[0], *self.settings.hosts, *listened))

    def gpu_processes(self) -> Mapping[ProcessKey, float | None] | None:
        """Return the processes that the driver lists in the current frame; None before the first one.

        Each with its idle time in seconds, None if the driver does not report its use of one of its devices.
        """
        if self.current.frame is None:
            return None
        found: dict[ProcessKey, float | None] = {}
        for device in self.current.frame.snapshot.devices:
            for key, process in device.processes_by_key.items():
                idle, other = process.idle_seconds, found.get(key, inf)
                found[key] = None if idle is None or other is None else min(idle, other)
        return found

    async def _read_driver(self) -> Reading | None:
        return await self.edges.collector.read(wait=FLUSH_READ_SECONDS)

    async def _keep(self, receipt: Receipt) -> None:
        """Store the receipt of an engine that was returned to service. The store has logged it if it cannot."""
        with suppress(StoreUnavailable):
            detail = {"engine": receipt.workload, "outcome": receipt.outcome, "reason": receipt.reason}
            await self.store.audit(receipt.requested_by, "engine.returned", detail)
            await self.store.add_receipts([receipt])

    def _flushed(self, receipt: Receipt) -> None:
        self.telemetry.flushed(receipt)
        self.events.flushed(receipt)
        self.baselines.flushed(receipt)


log = logging.getLogger(__name__)


class DeviceReader(Protocol):
    """The devices; `collector.supervisor.Collector` documents each method."""

    @property
    def state(self) -> SourceState: ...
    def start(self) -> None: ...
    async def read(self, wait: float) -> Reading | None: ...
    async def release(self, seconds: float) -> bool: ...
    async def stop(self) -> None: ...


class Agents(Protocol):
    """The connected agents; `agents.server.AgentServer` documents each method."""

    def serve(self) -> None: ...
    def reports(self) -> tuple[AgentReport, ...]: ...
    def report(self, identity: Identity) -> AgentReport | None: ...
    def silent(self) -> tuple[AgentReport, ...]: ...
    def keep(self, suspended: Collection[ProcessKey]) -> None: ...
    def ends(self) -> tuple[ProgramEnd, ...]: ...
    def departed(self) -> tuple[AgentReport, ...]: ...
    async def flush(self, identity: Identity, request: FlushCommand) -> FlushResult | None: ...
    async def ask(self, identity: Identity, request: AgentRequest, seconds: float = ...) -> AgentResponse | None: ...
    def flushing(self, identity: Identity) -> bool: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Clock:
    """``wall`` returns unix seconds, ``monotonic`` seconds since any fixed moment, ``uptime`` seconds since the
    machine started.
    """

    wall: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    uptime: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME)


def notifiers(settings: Settings) -> Sequence[Notifier]:
    return settings.receivers


@dataclass(frozen=True, slots=True, kw_only=True)
class Edges:
    """``telemetry`` and ``wake`` are here because the collector and the agents report to them."""

    collector: DeviceReader
    agents: Agents
    store: Store
    telemetry: Telemetry
    engines: Engines = field(default_factory=Engines)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the next tick is due at once."""
    clock: Clock = Clock()
    receivers: Callable[[Settings], Sequence[Notifier]] = notifiers
    retry_seconds: tuple[float, float] = BACKOFF_SECONDS
    """The shortest and the longest pause before a notification is sent again."""
    private_pid_namespace: bool | None = None
    faults: dict[str, Fault] = field(default_factory=dict)
    """Faults of the sockets and of the configuration, by name."""


@contextmanager
def real_edges(settings: Settings, source: str, worker: Worker | None = None) -> Iterator[Edges]:
    """Bind the agents' socket, and remove it at the end. ``source`` names an entry of ``sources.SOURCES``, which
    ``worker`` reads if there is one.

    Raises ConfigError if the socket cannot be bound.
    """
    telemetry, wake = Telemetry(), asyncio.Event()
    path = settings.agent_socket()
    agent_socket = AgentSocket(path, settings.agent_socket_mode(), settings.runtime_directory())
    faults: dict[str, Fault] = {}

    def restored() -> socket.socket | None:
        changed, problem = agent_socket.restored(), agent_socket.problem
        if problem:
            faults["agents"] = Fault("agents", "socket_lost", None, problem)
        elif faults.pop("agents", None) or changed:
            log.warning("%s had been removed; agents can connect again", path)
        return agent_socket.listener if changed else None

    collector = Collector(source, restarted=telemetry.restarted, opened=wake.set, first=worker)
    telemetry.add_processes(lambda: collector.pid)
    try:
        yield Edges(
            collector=collector,
            agents=AgentServer(
                agent_socket.listener,
                limits=Limits(reserved_descriptors=kept_from_agents()),
                reported=telemetry.reported,
                rejected=telemetry.rejected,
                restored=restored,
            ),
            store=Store(settings.store_file(), Bounds(settings.retention)),
            telemetry=telemetry,
            wake=wake,
            private_pid_namespace=in_private_pid_namespace(),
            faults=faults,
        )
    finally:
        agent_socket.close()
