"""Requests of the daemon to one agent, over its connection: a flush, and all others, with their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from gpumond.facts.messages import AgentRequest, AgentResponse, Cancel, FlushCommand, FlushResult, Message
from gpumond.facts.program import ProcessKey
from gpumond.host.peer import Identity
from gpumond.programs.connection import AgentConnection, Answer, Limits

ASK_SECONDS = 30.0
SUSPENDED = "this program is suspended, and executes nothing until it is resumed"
OLD_AGENT = "this program's agent is too old"
UNASKED = {
    "limit": "this program doesn't allow limits, or its agent is too old; allow them with "
    "gpumond.agent.start(allow_limit=True) or GPUMOND_ALLOW_LIMIT=1",
    "end": "this program has no function for requests to end, or its agent is too old; register one with "
    "gpumond.agent.on_end_request",
}


class Requests:
    """What sends requests: the server of the agents' connections. Runs on its event loop."""

    _loop: asyncio.AbstractEventLoop
    _limits: Limits
    _suspended: Collection[ProcessKey]
    _peers: dict[int, AgentConnection]

    def _send(self, peer: AgentConnection, message: Message) -> bool:
        """Send a whole message and return True; a peer that does not read its socket is dropped."""
        raise NotImplementedError

    async def flush(self, identity: Identity, request: FlushCommand) -> FlushResult | None:
        """Send a flush to one agent and return its answer: None if it timed out or the agent disconnected."""
        peer = self._newest(identity)
        if peer is None:
            return None
        seconds = request.timeout_seconds + self._limits.answer_seconds
        answer = await self._exchange(peer, request, peer.answers, seconds)
        if answer is None:
            peer.unanswered.add(request.id)
        return answer

    async def ask(
        self, identity: Identity, request: AgentRequest, seconds: float = ASK_SECONDS
    ) -> AgentResponse | None:
        """Send a command as `flush` does. A command that the agent does not support, or its program forbids, is
        not sent, and none to a suspended program.
        """
        peer = self._newest(identity)
        if peer is None or peer.hello is None:
            return None
        if request.kind not in peer.hello.answers:
            return AgentResponse(request.id, UNASKED.get(request.kind, OLD_AGENT))
        if identity.process in self._suspended:
            return AgentResponse(request.id, SUSPENDED)
        return await self._exchange(peer, request, peer.requests, seconds)

    async def _exchange(
        self,
        peer: AgentConnection,
        request: FlushCommand | AgentRequest,
        answers: dict[str, asyncio.Future[Answer]],
        seconds: float,
    ) -> Answer | None:
        """Send a request and await its answer. An agent that wakes up too late finds a Cancel behind the request."""
        if not self._send(peer, request):
            return None
        answer = answers[request.id] = self._loop.create_future()
        try:
            return await asyncio.wait_for(answer, seconds)
        except (asyncio.TimeoutError, ConnectionError):
            self._send(peer, Cancel(request.id))
            return None
        finally:
            answers.pop(request.id, None)

    def flushing(self, identity: Identity) -> bool:
        """Return True if a flush of that process may still run: its agent is connected and has not answered."""
        return any(peer.answers or peer.unanswered for peer in self._peers.values() if peer.identity == identity)

    def _newest(self, identity: Identity) -> AgentConnection | None:
        own = [peer for peer in self._peers.values() if peer.identity == identity and (peer.report or peer.unread)]
        return max(own, key=lambda peer: peer.received_at, default=None)
