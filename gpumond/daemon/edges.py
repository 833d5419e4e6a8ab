"""The real edges of a daemon: the agents' socket, the process that reads the driver, the store."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from gpumond.config.settings import Settings
from gpumond.devices.child.supervisor import Supervisor, Worker
from gpumond.facts.snapshot import Fault
from gpumond.host.machine import in_private_pid_namespace, kept_from_agents
from gpumond.host.runtime_directory import AgentSocket
from gpumond.kernel import Edges
from gpumond.metrics.telemetry import Telemetry
from gpumond.programs.connection import Limits
from gpumond.programs.server import AgentServer
from gpumond.store.retention import Bounds
from gpumond.store.store import Store

log = logging.getLogger(__name__)


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

    devices = Supervisor(source, restarted=telemetry.restarted, opened=wake.set, first=worker)
    telemetry.add_processes(lambda: devices.pid)
    try:
        yield Edges(
            devices=devices,
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
