"""Requests to programs that grow to search for the lines that keep the memory, once for each verdict.

An agent answers only if its program's flush_policy is ``allow``. The result is part of its later reports.
"""

from __future__ import annotations

import logging
import uuid

from gpumond.core import Core, Part, Tick
from gpumond.facts.frame import Frame
from gpumond.facts.messages import AgentRequest
from gpumond.facts.program import ProcessKey
from gpumond.host.peer import PeerIdentity
from gpumond.host.tasks import Tasks, cancel_all
from gpumond.programs.agent_server import AgentServer, identity_of

log = logging.getLogger(__name__)

MAX_REMEMBERED = 4096


class RetainerRequests:
    """Remembers the growth for which it has sent a request."""

    def __init__(self, agents: AgentServer) -> None:
        self._agents = agents
        self._requested: dict[tuple[ProcessKey, float], None] = {}
        self._tasks = Tasks()

    def send_due(self, frame: Frame) -> None:
        """Send a request for each new growth of a connected program."""
        for verdict in frame.verdicts:
            process = verdict.process
            report = None if process is None else frame.snapshot.reports_by_process.get(process)
            if verdict.kind not in ("leak", "growing") or process is None or report is None:
                continue
            growth = process, verdict.since
            if growth not in self._requested:
                self._requested[growth] = None
                self._requested = dict(list(self._requested.items())[-MAX_REMEMBERED:])
                self._tasks.start(self._ask(identity_of(report)))

    async def close(self) -> None:
        await cancel_all(self._tasks)

    async def _ask(self, identity: PeerIdentity) -> None:
        answer = await self._agents.ask(identity, AgentRequest(uuid.uuid4().hex, "retainers"))
        reason = "the program didn't respond" if answer is None else answer.reason
        if reason:
            log.info("pid %d isn't searched for the lines that retain its memory: %s", identity.pid, reason)


class RetainerRequestsPart(RetainerRequests, Part):
    def __init__(self, core: Core) -> None:
        super().__init__(core.programs)

    def act(self, tick: Tick) -> None:
        self.send_due(tick.frame)
