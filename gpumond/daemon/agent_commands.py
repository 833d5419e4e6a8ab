"""Commands to one program other than a flush: a soft limit, the framework's memory snapshot."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from gpumond.engine.quotas import DueLimit
from gpumond.errors import NoSuchTarget
from gpumond.host.event_loop import in_slices
from gpumond.host.peer_credentials import Identity
from gpumond.model.cooperative import Steps
from gpumond.model.snapshot import AgentReport
from gpumond.protocol.messages import AgentRequest, AgentResponse, Asked


class AgentConnections(Protocol):
    def reporting(self) -> Steps[Sequence[AgentReport]]: ...
    async def ask(self, identity: Identity, request: AgentRequest) -> AgentResponse | None: ...


class AgentCommands:
    """``audit`` records the requester before the request, and raises StoreUnavailable; ``note`` records the answer."""

    def __init__(
        self,
        agents: AgentConnections,
        audit: Callable[[str, str, Any], Awaitable[None]],
        note: Callable[[str, str, Any], Awaitable[None]],
    ) -> None:
        self._agents, self._audit, self._note = agents, audit, note

    async def ask(
        self, pid: int, kind: Asked, limit_bytes: int | None, device: str | None, requested_by: str
    ) -> AgentResponse | None:
        """Send a command; None if the program did not answer in time. Raises NoSuchTarget, StoreUnavailable."""
        reports = await in_slices(self._agents.reporting())
        report = next((report for report in reports if report.pid == pid), None)
        if report is None:
            raise NoSuchTarget(f"no connected agent has pid {pid}; `gpumond status` lists the agents")
        ask = AgentRequest(uuid.uuid4().hex, kind, limit_bytes, device)
        return await self._send(report, ask, requested_by)

    async def set_limit(self, due: DueLimit) -> AgentResponse | None:
        """Set or remove the limit of a quota; None if the program did not answer. Raises StoreUnavailable."""
        ask = AgentRequest(uuid.uuid4().hex, "limit", due.limit_bytes, quota=due.quota)
        return await self._send(due.report, ask, f"quota:{due.quota}" if due.quota else "quota")

    async def request_end(self, report: AgentReport, requested_by: str) -> str:
        """Ask a program to end, and return the reason if it was not asked. Raises StoreUnavailable."""
        answer = await self._send(report, AgentRequest(uuid.uuid4().hex, "end"), requested_by)
        return "it did not answer in time" if answer is None else answer.reason

    async def _send(self, report: AgentReport, ask: AgentRequest, requested_by: str) -> AgentResponse | None:
        asked: dict[str, Any] = {"pid": report.pid, "workload": report.workload}
        if ask.kind == "limit":
            asked |= {"limit_bytes": ask.limit_bytes, "device": ask.device_uuid}
        await self._audit(requested_by, f"agent.{ask.kind}", asked)
        answer = await self._agents.ask(Identity(report.pid, report.start_ticks, report.uid), ask)
        recorded = {"answer": None} if answer is None else asdict(answer)
        await self._note(requested_by, f"agent.{ask.kind}.answer", {"pid": report.pid, **recorded})
        return answer
