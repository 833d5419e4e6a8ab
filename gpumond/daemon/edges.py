"""The edges of a Daemon: everything that does I/O or reads a clock, and the factory of the real ones."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from gpumond.agents.limits import Limits
from gpumond.agents.server import AgentServer
from gpumond.alerting.outbox import BACKOFF_SECONDS
from gpumond.alerting.receivers import Notifier
from gpumond.collector.start import Worker
from gpumond.collector.supervisor import Collector
from gpumond.config import Settings
from gpumond.engines.poller import Engines
from gpumond.host.fd_limits import kept_from_agents
from gpumond.host.peer_credentials import Identity
from gpumond.host.processes import in_private_pid_namespace
from gpumond.host.runtime_directory import AgentSocket
from gpumond.metrics.telemetry import Telemetry
from gpumond.model.cooperative import Steps
from gpumond.model.process import ProcessKey
from gpumond.model.snapshot import AgentReport, Fault, ProgramEnd, Reading, SourceState
from gpumond.protocol.messages import AgentRequest, AgentResponse, FlushCommand, FlushResult
from gpumond.store import Bounds, Store

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
    def reporting(self) -> Steps[tuple[AgentReport, ...]]: ...
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
