"""Requests to programs with a leak: one for each leak of a connected program."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from gpumond.facts.frame import Frame, Verdict
from gpumond.facts.messages import AgentRequest, AgentResponse
from gpumond.facts.snapshot import AgentReport
from gpumond.features.agent_requests.retainer_requests import RetainerRequests
from gpumond.host.peer import PeerIdentity
from gpumond.tick.ledger import make_ledger
from tests.helpers.values import make_device, make_report, make_snapshot

LEAK = Verdict(device_uuid="GPU-a", pid=10, start_ticks=100, kind="leak", since=1.0, summary="it grows")


class Agents:
    """Records the requests; an agent refuses, or does not answer."""

    def __init__(self, answers: bool = True) -> None:
        self.requests: list[tuple[PeerIdentity, str]] = []
        self._answers = answers

    def reports(self) -> Sequence[AgentReport]:
        return ()

    async def ask(self, identity: PeerIdentity, request: AgentRequest, seconds: float = 30.0) -> AgentResponse | None:
        self.requests.append((identity, request.kind))
        if not self._answers:
            await asyncio.Event().wait()
        return AgentResponse(request.id, "refused")


def frame(*verdicts: Verdict) -> Frame:
    snapshot = make_snapshot(make_device(), reports=(make_report(),))
    return Frame(snapshot, make_ledger(snapshot), verdicts)


def test_each_leak_is_asked_about_once():
    agents = Agents()

    async def run() -> None:
        inquiry = RetainerRequests(agents)
        for _ in range(3):
            inquiry.send_due(frame(LEAK))
            await asyncio.sleep(0)
        inquiry.send_due(frame(replace(LEAK, since=2.0)))
        await inquiry.close()

    asyncio.run(run())
    identity = PeerIdentity(10, 100, 1000)
    assert agents.requests[0] == (identity, "retainers")
    assert len(agents.requests) <= 2


def test_other_verdicts_and_programs_without_an_agent_are_not_asked_about():
    agents = Agents()

    async def run() -> None:
        inquiry = RetainerRequests(agents)
        for verdict in (
            replace(LEAK, kind="steady"),
            replace(LEAK, pid=11),
            replace(LEAK, pid=None, start_ticks=None),
        ):
            inquiry.send_due(frame(verdict))
        await asyncio.sleep(0)
        await inquiry.close()

    asyncio.run(run())
    assert agents.requests == []


def test_end_does_not_wait_for_an_answer():
    agents = Agents(answers=False)

    async def run() -> None:
        inquiry = RetainerRequests(agents)
        inquiry.send_due(frame(LEAK))
        await asyncio.sleep(0)
        await asyncio.wait_for(inquiry.close(), 30)

    asyncio.run(run())
    assert len(agents.requests) == 1


def test_growth_that_is_only_suspected_is_asked_about():
    agents = Agents()

    async def run() -> None:
        inquiry = RetainerRequests(agents)
        inquiry.send_due(frame(replace(LEAK, kind="growing")))
        await asyncio.sleep(0)
        await inquiry.close()

    asyncio.run(run())
    assert len(agents.requests) == 1
