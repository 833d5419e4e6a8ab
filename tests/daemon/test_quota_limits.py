"""Limits of quotas: one user's programs do not delay those of another, and fill no audit."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from gpumond.facts.errors import StoreUnavailable
from gpumond.facts.messages import AgentResponse
from gpumond.facts.program import AppliedLimit
from gpumond.facts.quota import EffectiveQuota
from gpumond.facts.snapshot import AgentReport, ProcessQuota, Snapshot
from gpumond.features.quotas.quotas import MAX_CONCURRENT_PROGRAMS, MAX_LIMITS_PER_HOUR, RETRY_SECONDS, ProgramLimiter
from gpumond.serve.examples import REPORT, SNAPSHOT
from tests.helpers.agent_server import in_event_loop

QUOTA = EffectiveQuota(limit_bytes=40, limit_quota="team")


def snapshot(*reports: AgentReport, at: float = 0.0) -> Snapshot:
    quotas = tuple(ProcessQuota(pid=each.pid, start_ticks=each.start_ticks, quota=QUOTA) for each in reports)
    return replace(SNAPSHOT, reports=reports, quotas=quotas, elapsed_seconds=at)


def program(pid: int, uid: int) -> AgentReport:
    return replace(REPORT, pid=pid, uid=uid, allows_limit=True)


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@in_event_loop
async def test_programs_that_do_not_answer_delay_no_other_user():
    sent: list[int] = []

    async def set_limit(report: AgentReport, limit_bytes: int | None, quota: str) -> AgentResponse | None:
        sent.append(report.pid)
        if report.uid == 1:
            await asyncio.Event().wait()
        return None

    limits = ProgramLimiter(set_limit)
    silent = [program(pid, 1) for pid in range(1, MAX_CONCURRENT_PROGRAMS + 5)]
    limits.execute(snapshot(*silent, program(100, 2)))
    await settled()
    assert len(sent) == MAX_CONCURRENT_PROGRAMS + 1
    assert 100 in sent
    await limits.close()


@in_event_loop
async def test_limits_of_one_users_programs_are_sent_at_a_limited_rate():
    sent: list[int] = []

    async def set_limit(report: AgentReport, limit_bytes: int | None, quota: str) -> AgentResponse | None:
        sent.append(report.uid)
        return AgentResponse("id", "", (AppliedLimit("torch", None, 40, True),))

    limits = ProgramLimiter(set_limit)
    for number in range(2 * MAX_LIMITS_PER_HOUR):
        limits.execute(snapshot(program(number + 1, 1)))
        await settled()
    limits.execute(snapshot(program(1000, 2)))
    await settled()
    assert sent == [1] * MAX_LIMITS_PER_HOUR + [2]
    await limits.close()


@in_event_loop
async def test_limit_that_cannot_be_recorded_is_due_again():
    tried: list[int] = []

    async def set_limit(report: AgentReport, limit_bytes: int | None, quota: str) -> AgentResponse | None:
        tried.append(report.pid)
        raise StoreUnavailable("the disk is full")

    limits = ProgramLimiter(set_limit)
    for at in (0.0, 1.0, RETRY_SECONDS):
        limits.execute(snapshot(program(1, 1), at=at))
        await settled()
    assert tried == [1, 1]
    await limits.close()
