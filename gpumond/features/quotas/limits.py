"""The limits of quotas in the programs that allow them."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence

from gpumond.facts.errors import StoreUnavailable
from gpumond.facts.messages import AgentResponse
from gpumond.facts.process import ProcessKey
from gpumond.facts.program import AppliedLimit
from gpumond.facts.snapshot import AgentReport, Snapshot
from gpumond.facts.units import HOUR_SECONDS
from gpumond.features.quotas.quotas import DueLimit, SentLimit, answered, due_limits
from gpumond.host.peer import person_of
from gpumond.serve.limits import TokenBucket

PROGRAMS_AT_ONCE = 16
"""Programs of one user to which a limit is sent at the same time."""
SENT_PER_HOUR = 128
"""Limits sent to the programs of one user, so that a program that changes its limit does not fill the audit."""


class QuotaLimits:
    """``set_limit`` sets the limit of one program, and raises StoreUnavailable if it cannot be recorded."""

    def __init__(self, set_limit: Callable[[AgentReport, int | None, str], Awaitable[AgentResponse | None]]) -> None:
        self._set_limit = set_limit
        self._sent: dict[ProcessKey, SentLimit] = {}
        self._answers: list[tuple[DueLimit, Sequence[AppliedLimit]]] = []
        """Answers since the last decision. They are noted before the next one, since others are awaited during it."""
        self._places: defaultdict[int, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(PROGRAMS_AT_ONCE))
        self._rate = TokenBucket(SENT_PER_HOUR, HOUR_SECONDS)
        self._tasks: set[asyncio.Task[None]] = set()

    def execute(self, snapshot: Snapshot) -> None:
        """Start to set the limits that are due; waits for none of them."""
        self._note_answers()
        due, self._sent = due_limits(snapshot, self._sent)
        for each in due:
            user, now = str(person_of(each.report.uid)), snapshot.elapsed_seconds
            if self._rate.wait(user, now) > 0:
                continue  # it is due again later
            self._rate.count(user, now)
            task = asyncio.create_task(self._carry_out(each))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _carry_out(self, due: DueLimit) -> None:
        async with self._places[person_of(due.report.uid)]:
            try:
                answer = await self._set_limit(due.report, due.limit_bytes, due.quota)
            except StoreUnavailable:
                return  # the store has logged it; the limit is due again later
        if answer is not None:
            self._answers.append((due, answer.limits))

    def _note_answers(self) -> None:
        for due, limits in self._answers:
            sent = self._sent.get(due.report.key)
            if sent is not None and (sent.limit_bytes, sent.quota) == (due.limit_bytes, due.quota):
                self._sent[due.report.key] = answered(sent, limits)
        self._answers.clear()
