"""Senders of reports for many programs: messages and transport of the agent, on one event loop."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence

from bench.many_agents import Program, ProgramConnection
from gpumond.agent.transport import Transport
from gpumond.agent.wakeup import file_identity
from gpumond.facts.messages import Hello, Report, encode
from gpumond.facts.pools import PoolUsage, Reclaimable
from gpumond.facts.program import Program as ReportedProgram, StepUsage
from tests.fakenvml import GIB, MIB, machine

DEVICES = 8
VARIANTS = 8
WORKLOADS = 20
START_SECONDS = 2.0


class ReportSenders:
    """All agents. They connect in the first two seconds, and reconnect as agents do."""

    def __init__(self, path: str, programs: Sequence[Program]) -> None:
        uuids = [device.uuid for device in machine(DEVICES)]
        share = 70 * GIB // -(-len(programs) // DEVICES)
        self._loop = asyncio.new_event_loop()
        self._random = random.Random(1)
        self._agents = [
            Agent(self._loop, path, program, f"train-{number % WORKLOADS}", _encoded_reports(uuid, share))
            for number, program in enumerate(programs)
            for uuid in [uuids[number * DEVICES // len(programs)]]
        ]
        self._phases = sorted(self._random.random() for _ in programs)
        self._random.shuffle(self._agents)
        for agent in self._agents:
            self._loop.call_later(self._random.random() * START_SECONDS, agent.connect)

    def send_reports(self, hz: float, seconds: float, variants: int = VARIANTS) -> dict[str, object]:
        """Send reports at a rate per program for a time. Returns the results since the last call.

        ``variants``: reports of a program that differ; 1 if each repeats the last one.
        """
        before, at_work = time.monotonic(), time.process_time()
        late = self._loop.run_until_complete(self._send_for(hz, seconds, variants))
        sums = {name: sum(getattr(agent, name) for agent in self._agents) for name in Agent.COUNTS}
        for agent in self._agents:
            agent.reset_counts()
        return {
            **sums,
            "agents": len(self._agents),
            "connected": sum(agent.link.is_connected for agent in self._agents),
            "last_connected_at": max(agent.connected_at for agent in self._agents),
            "frame_bytes": len(self._agents[0].encoded_reports[0]),
            "swarms_share_of_a_core": round((time.process_time() - at_work) / (time.monotonic() - before), 2),
            "swarm_late_s_at_most": round(late, 3),
        }

    async def _send_for(self, hz: float, seconds: float, variants: int) -> float:
        began, late = time.monotonic(), 0.0
        for number in range(round(seconds * hz)):
            for agent, phase in zip(self._agents, self._phases, strict=True):
                now = time.monotonic()
                due = began + (number + phase) / hz
                if due > now:
                    await asyncio.sleep(due - now)
                else:
                    late = max(late, now - due)
                    await asyncio.sleep(0)
                agent.report(number % variants)
        return late


class Agent:
    """Agent of one program: it connects, sends hello and reports, and reconnects when the daemon has closed the
    connection.
    """

    COUNTS = ("reports", "replaced", "attempts", "connections")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, path: str, program: Program, workload: str, encoded_reports: list[bytes]
    ) -> None:
        self.link, self.encoded_reports = ProcessTransport(program), encoded_reports
        self._loop, self._path, self._hello = loop, path, Hello(workload, "0", "3.11", ())
        self.connected_at = 0.0
        self.reset_counts()

    def reset_counts(self) -> None:
        self.reports = self.replaced = self.attempts = self.connections = 0

    def connect(self) -> None:
        self.attempts += 1
        now = time.monotonic()
        if not self.link.connect(self._path, now):
            self._reconnect()
            return
        self.connected_at = now
        self.connections += 1
        self._descriptor = self.link.fileno()
        self._loop.add_reader(self._descriptor, self._on_readable)
        self.link.enqueue(self._hello)
        self.report(0)

    def report(self, number: int) -> None:
        """Count reports that are sent or queued; only the newest queued one is kept."""
        if self.link.is_connected:
            self.reports += 1
            self.replaced += self.link.send_encoded(self.encoded_reports[number], time.monotonic())
            self._check_connected()

    def _on_readable(self) -> None:
        self.link.receive(time.monotonic())
        self._check_connected()

    def _check_connected(self) -> None:
        """Return whether the daemon is still connected."""
        if not self.link.is_connected:
            self._loop.remove_reader(self._descriptor)
            self._reconnect()

    def _reconnect(self) -> None:
        self._loop.call_at(self._loop.time() + max(0.0, self.link.next_attempt_at - time.monotonic()), self.connect)


class ProcessTransport(Transport):
    """Transport of the agent whose connection is made by the process of a program."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self._program = program

    def connect(self, path: str, now: float) -> bool:
        connection: ProgramConnection | None = self._program.connect()
        if connection is None:
            self._retry_later(now)
            return False
        self._socket, self._file_identity, self._connected_at = connection, file_identity(connection.fileno()), now
        return True

    def send_encoded(self, encoded: bytes, now: float) -> bool:
        """Send an encoded report. Returns whether a queued one was replaced."""
        replaced, self._queued_report = bool(self._queued_report), encoded
        self.send_pending(now)
        return replaced


def _encoded_reports(device_uuid: str, share: int) -> list[bytes]:
    """Return reports like those of a PyTorch program in training, each slightly different."""
    return [encode(_report(device_uuid, share, number)) for number in range(VARIANTS)]


def _report(device_uuid: str, share: int, number: int) -> Report:
    live, cached, stranded = share // 2 + number * MIB, share // 4, share // 16
    pool = PoolUsage(
        allocator="torch",
        device_uuid=device_uuid,
        live_bytes=live,
        held_bytes=live + cached + stranded,
        reclaimable=Reclaimable(cached, cached, cached),
        stranded_bytes=stranded,
        peak_live_bytes=live,
        peak_held_bytes=live + cached + stranded,
        ooms=0,
        retries=0,
        device_allocations=200 + number,
        device_frees=100,
    )
    steps = StepUsage(
        steps=1000 + number,
        steps_per_second=9.5,
        retained_bytes=0.0,
        live_bytes=live,
        stranded_bytes=stranded,
        retries=0,
    )
    return Report("allow", ("torch 2.13.0",), (pool,), ReportedProgram(step=steps))
