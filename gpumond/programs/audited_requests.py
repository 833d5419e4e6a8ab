"""Requests to one program that the audit log records, other than a flush: a limit, the framework's memory snapshot and
its file, the classes of live bytes, and the request to end.
"""

from __future__ import annotations

import asyncio
import base64
import uuid
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any

from gpumond.facts.errors import LIST_PROGRAMS_HINT, NoSuchTarget
from gpumond.facts.messages import AgentRequest, AgentResponse, RequestKind
from gpumond.facts.snapshot import AgentReport
from gpumond.facts.units import size_text
from gpumond.programs.agent_server import ANSWER_TIMEOUT_SECONDS, AgentServer, identity_of

MAX_FILE_BYTES = 256 << 20
MAX_PART_BYTES = 1 << 20
MAX_PARTS_AT_ONCE = 64
PART_INTERVAL_SECONDS = 0.1
"""Number of parts of a file that are requested at once, then seconds for each further one. An agent disconnects from a
daemon that sends more than 16 messages a second.
"""


class PartMissing(Exception):
    """A part of a file did not arrive, or is not what the agent announced."""


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    """A snapshot's file of ``size_bytes``. ``parts`` yields its bytes, and raises PartMissing."""

    size_bytes: int
    parts: AsyncGenerator[bytes, None]


class AuditedRequests:
    """``audit`` records the requester before the request, and raises StoreUnavailable. ``audit_answer`` records the
    answer.
    """

    def __init__(
        self,
        agents: AgentServer,
        audit: Callable[[str, str, Any], Awaitable[None]],
        audit_answer: Callable[[str, str, Any], Awaitable[None]],
    ) -> None:
        self._agents, self._audit, self._audit_answer = agents, audit, audit_answer

    async def ask(
        self,
        pid: int,
        kind: RequestKind,
        limit_bytes: int | None,
        device: str | None,
        requested_by: str,
        uid: int | None,
        record_seconds: float | None = None,
    ) -> AgentResponse | None:
        """Send a command; None if the program did not answer in time. ``uid``: the only user whose programs may be
        asked, or None for all.

        Raises NoSuchTarget, StoreUnavailable.
        """
        request = AgentRequest(uuid.uuid4().hex, kind, limit_bytes, device, record_seconds)
        return await self._send(self._report(pid, uid), request, requested_by)

    async def open_snapshot(
        self, pid: int, snapshot_id: int, requested_by: str, uid: int | None
    ) -> SnapshotFile | AgentResponse | None:
        """Open the file of a snapshot: its bytes, the program's refusal, or None if it did not answer in time. ``uid``
        as for ``ask``.

        Raises NoSuchTarget, StoreUnavailable.
        """
        report = self._report(pid, uid)
        audit_details = {"pid": pid, "workload": report.workload, "snapshot": snapshot_id}
        await self._audit(requested_by, "agent.fetch", audit_details)
        answer = await self._fetch_part(report, snapshot_id, 0)
        if answer is None or not answer.part or answer.file_bytes is None:
            return answer
        if answer.file_bytes > MAX_FILE_BYTES:
            return AgentResponse(answer.id, f"the file is larger than {size_text(MAX_FILE_BYTES)}")
        return SnapshotFile(answer.file_bytes, self._fetch_parts(report, snapshot_id, answer, answer.file_bytes))

    async def _fetch_parts(
        self, report: AgentReport, snapshot_id: int, answer: AgentResponse, file_bytes: int
    ) -> AsyncGenerator[bytes, None]:
        sent_bytes = parts_sent = 0
        while True:
            part = _decode_part(answer)[: file_bytes - sent_bytes]
            if not part and sent_bytes < file_bytes:
                raise PartMissing(f"{file_bytes - sent_bytes} bytes of {file_bytes} are missing")
            yield part
            sent_bytes, parts_sent = sent_bytes + len(part), parts_sent + 1
            if sent_bytes >= file_bytes:
                return
            if parts_sent >= MAX_PARTS_AT_ONCE:
                await asyncio.sleep(PART_INTERVAL_SECONDS)
            next_answer = await self._fetch_part(report, snapshot_id, sent_bytes)
            if next_answer is None:
                raise PartMissing("the program didn't respond in time")
            answer = next_answer

    async def _fetch_part(self, report: AgentReport, snapshot_id: int, offset: int) -> AgentResponse | None:
        request = AgentRequest(uuid.uuid4().hex, "fetch", snapshot_id=snapshot_id, offset=offset)
        return await self._agents.ask(identity_of(report), request)

    def _report(self, pid: int, uid: int | None) -> AgentReport:
        report = next((report for report in self._agents.reports() if report.pid == pid), None)
        if report is None:
            raise NoSuchTarget(f"no program with an agent has pid {pid}{LIST_PROGRAMS_HINT}")
        if uid not in (None, report.uid):
            raise NoSuchTarget(
                f"pid {pid} is another user's program; requests to it require an administrator: root, "
                "the daemon's user, or a token with the admin scope"
            )
        return report

    async def set_limit(self, report: AgentReport, limit_bytes: int | None, quota: str) -> AgentResponse | None:
        """Set or remove the limit of a quota; None if the program did not answer. Raises StoreUnavailable."""
        request = AgentRequest(uuid.uuid4().hex, "limit", limit_bytes, quota=quota)
        return await self._send(report, request, "quota" if limit_bytes is None else f"quota:{quota}")

    async def request_end(self, report: AgentReport, requested_by: str) -> str:
        """Ask a program to end, and return the reason if it was not asked. Raises StoreUnavailable."""
        answer = await self._send(report, AgentRequest(uuid.uuid4().hex, "end"), requested_by)
        return "the program didn't respond in time" if answer is None else answer.reason

    async def _send(self, report: AgentReport, request: AgentRequest, requested_by: str) -> AgentResponse | None:
        audit_details: dict[str, Any] = {"pid": report.pid, "workload": report.workload}
        if request.kind == "limit":
            audit_details |= {
                "start_ticks": report.start_ticks,
                "limit_bytes": request.limit_bytes,
                "device": request.device_uuid,
            }
            audit_details["before"] = lowest_limits(report, request.device_uuid)
        if request.record_seconds is not None:
            audit_details |= {"record_seconds": request.record_seconds}
        await self._audit(requested_by, f"agent.{request.kind}", audit_details)
        answer = await self._agents.ask(
            identity_of(report), request, ANSWER_TIMEOUT_SECONDS + (request.record_seconds or 0.0)
        )
        await self._audit_answer(
            requested_by, f"agent.{request.kind}.answer", {"pid": report.pid, **_audited_answer(answer)}
        )
        return answer


def lowest_limits(report: AgentReport, device_uuid: str | None) -> dict[str, int]:
    """Return the lowest limit in bytes on each device, or on one, except those of quotas."""
    limits: dict[str, int] = {}
    for each in report.limits:
        if not each.quota and device_uuid in (None, each.device_uuid):
            limits[each.device_uuid] = min(each.limit_bytes, limits.get(each.device_uuid, each.limit_bytes))
    return limits


def _audited_answer(answer: AgentResponse | None) -> dict[str, Any]:
    """Return an answer for the audit, without what it states about the program's memory."""
    if answer is None:
        return {"answer": None}
    fields = asdict(answer)
    return {name: fields[name] for name in ("id", "reason", "limits", "dump")}


def _decode_part(answer: AgentResponse) -> bytes:
    """Return the bytes of a part. Raises PartMissing."""
    try:
        unpacking = zlib.decompressobj()
        part = unpacking.decompress(base64.b64decode("".join(answer.part), validate=True), MAX_PART_BYTES)
    except (ValueError, zlib.error):
        raise PartMissing("a part of the snapshot is damaged") from None
    if len(part) != answer.part_bytes or unpacking.unconsumed_tail:
        raise PartMissing("a part of the snapshot is damaged")
    return part
