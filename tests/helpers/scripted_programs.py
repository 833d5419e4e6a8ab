"""Programs of a test's flushes, with the answers that the test defines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from gpumond.facts.flush import FlushRequest, FlushResponse, Target
from gpumond.facts.messages import FlushCommand, FlushResult, PoolChange
from gpumond.facts.pools import ExpectedRelease, FlushOutcome, StepResult
from gpumond.facts.snapshot import AgentReport, Reading
from gpumond.features.flush.flusher import Flusher
from gpumond.host.peer import PeerIdentity
from gpumond.programs.agent_server import identity_of
from tests.helpers.agents import GIB
from tests.helpers.values import make_device, make_pool, make_process, make_report

Response = Callable[["ScriptedPrograms", PeerIdentity, FlushCommand], FlushResult | None]


class ScriptedPrograms:
    """Programs on devices. A flush changes the driver's counts at once, or after ``lag`` readings."""

    def __init__(self, *reports: AgentReport, respond: Response | None = None, lag: int = 0) -> None:
        self.programs = list(reports)
        self.respond = respond or release_all
        self.lag = lag
        self.flushed: list[int] = []
        self.running = 0
        self.most_running = 0
        self.driver_counts = {
            (report.pid, pool.device_uuid): pool.held_bytes + GIB for report in reports for pool in report.pools
        }
        self.unread_releases: list[tuple[int, str, int]] = []
        self.gate: asyncio.Event | None = None
        self.silent: set[int] = set()
        """Pids whose agents never answer."""
        self.unanswered: set[PeerIdentity] = set()

    def reports(self) -> Sequence[AgentReport]:
        return self.programs

    def report(self, identity: PeerIdentity) -> AgentReport | None:
        return next((report for report in self.programs if identity_of(report) == identity), None)

    async def flush(self, identity: PeerIdentity, request: FlushCommand) -> FlushResult | None:
        self.flushed.append(identity.pid)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        if identity.pid in self.silent:
            await asyncio.Event().wait()
        await (self.gate.wait() if self.gate else asyncio.sleep(0))
        self.running -= 1
        return self.respond(self, identity, request)

    def is_flushing(self, identity: PeerIdentity) -> bool:
        return identity in self.unanswered

    async def read_driver(self) -> Reading | None:
        if self.lag:
            self.lag -= 1
        else:
            while self.unread_releases:
                pid, device, freed = self.unread_releases.pop()
                self.driver_counts[pid, device] -= freed
        devices = {device for _, device in self.driver_counts}
        return Reading(
            devices=tuple(
                make_device(
                    uuid,
                    processes=tuple(
                        make_process(pid, used_bytes=used)
                        for (pid, on), used in self.driver_counts.items()
                        if on == uuid
                    ),
                )
                for uuid in sorted(devices)
            )
        )

    def refill(self) -> None:
        """Set the driver's counts to the values before the flushes."""
        for report in self.programs:
            for pool in report.pools:
                self.driver_counts[report.pid, pool.device_uuid] = pool.held_bytes + GIB

    def flusher(self, **options: Any) -> Flusher:
        return Flusher(self, self.read_driver, **{"settle_seconds": 0.5} | options)

    def run(self, **fields: object) -> FlushResponse:
        request = FlushRequest(**({"target": Target(all=True)} | fields))  # type: ignore[arg-type]
        return asyncio.run(self.flusher().flush(request, "test"))


def release_all(scripted: ScriptedPrograms, identity: PeerIdentity, request: FlushCommand) -> FlushResult:
    """Release exactly the bytes that the pools promise."""
    changes = []
    report = next(report for report in scripted.programs if report.pid == identity.pid)
    for pool in report.pools:
        if pool.allocator == request.allocator:
            likely = pool.reclaimable.likely
            after = make_pool(pool.device_uuid, live=pool.live_bytes, stranded=pool.stranded_bytes)
            if not request.dry_run:
                scripted.unread_releases.append((identity.pid, pool.device_uuid, likely))
            changes.append(
                PoolChange(pool, pool if request.dry_run else after, ExpectedRelease(likely, likely, likely))
            )
    outcome: FlushOutcome = "planned" if request.dry_run else "freed"
    return FlushResult(request.id, outcome, "", tuple(changes), (StepResult("cache", 0, 0.1),))


def train(
    pid: int = 10, cached: int = 3 * GIB, device: str = "GPU-a", refilled_flushes: int = 0, **fields: object
) -> AgentReport:
    return make_report(
        pid, pools=(make_pool(device, live=GIB, cached=cached, refilled_flushes=refilled_flushes),), **fields
    )
