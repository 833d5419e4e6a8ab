"""The file of a snapshot, requested from an agent in parts."""

from __future__ import annotations

import asyncio
import base64
import os
import zlib
from collections.abc import Sequence
from typing import Any

import pytest

from gpumond.facts.messages import AgentRequest, AgentResponse
from gpumond.facts.snapshot import AgentReport
from gpumond.host.peer import PeerIdentity
from gpumond.programs.audited_requests import (
    MAX_FILE_BYTES,
    MAX_PARTS_AT_ONCE,
    AuditedRequests,
    PartMissing,
    SnapshotFile,
)
from tests.helpers.values import make_report

CONTENT = os.urandom(1000) * 50
PART = 4096


def part(content: bytes, **fields: Any) -> AgentResponse:
    encoded = base64.b64encode(zlib.compress(content)).decode()
    given = {"part": (encoded,), "part_bytes": len(content), "file_bytes": len(CONTENT)} | fields
    return AgentResponse("id", **given)


class Agents:
    """One agent with one file. ``later`` answers instead of it from the second part on."""

    def __init__(
        self, first: AgentResponse | None = None, later: AgentResponse | None = None, gone: bool = False
    ) -> None:
        self._first, self._later, self._gone = first, later, gone
        self.requests: list[AgentRequest] = []

    def reports(self) -> Sequence[AgentReport]:
        return (make_report(),)

    async def ask(self, identity: PeerIdentity, request: AgentRequest, seconds: float = 30.0) -> AgentResponse | None:
        self.requests.append(request)
        if request.offset == 0:
            return self._first or part(CONTENT[:PART])
        if self._later or self._gone:
            return self._later
        return part(CONTENT[request.offset : request.offset + PART])


def fetched(agents: Agents) -> tuple[bytes, list[str]]:
    actions: list[str] = []

    async def audit(actor: str, action: str, detail: Any) -> None:
        actions.append(f"{actor} {action} {detail['snapshot']}")

    async def run() -> bytes:
        found = await AuditedRequests(agents, audit, audit).open_snapshot(10, 1, "token", None)
        assert isinstance(found, SnapshotFile)
        assert found.size_bytes == len(CONTENT)
        return b"".join([each async for each in found.parts])

    return asyncio.run(run()), actions


def test_parts_make_the_file():
    agents = Agents()
    assert fetched(agents) == (CONTENT, ["token agent.fetch 1"])
    assert {(request.kind, request.snapshot_id) for request in agents.requests} == {("fetch", 1)}
    assert len(agents.requests) == -(-len(CONTENT) // PART) < MAX_PARTS_AT_ONCE


@pytest.mark.parametrize(
    "agents",
    [
        Agents(gone=True),
        Agents(later=AgentResponse("id", "the file was removed")),
        Agents(later=part(b"")),
        Agents(later=part(CONTENT[:PART], part_bytes=5)),
        Agents(later=AgentResponse("id", part=("no base64!",), part_bytes=5)),
        Agents(later=AgentResponse("id", part=(base64.b64encode(b"not zlib").decode(),), part_bytes=5)),
        Agents(later=part(bytes(2 << 20))),  # more than a part may have after decompression
    ],
)
def test_incomplete_file_is_an_error(agents: Agents):
    with pytest.raises(PartMissing):
        fetched(agents)


def test_last_part_cannot_exceed_the_announced_size():
    content, _ = fetched(Agents(later=part(CONTENT[PART:] + b"more")))
    assert len(content) == len(CONTENT)


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (AgentResponse("id", "snapshot 1 doesn't exist"), "doesn't exist"),
        (part(CONTENT, file_bytes=MAX_FILE_BYTES + 1), "larger than"),
    ],
)
def test_refusal_is_returned(first: AgentResponse, reason: str):
    async def audit(actor: str, action: str, detail: Any) -> None: ...

    found = asyncio.run(AuditedRequests(Agents(first), audit, audit).open_snapshot(10, 1, "token", None))
    assert isinstance(found, AgentResponse)
    assert reason in found.reason
