"""Flushes of a rule for the programs of two users: a flush of one process does not delay that of another."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest

from gpumond.facts.alerts import Action, ClockTimes, Labels, Notification, Rule, StoredAlert
from gpumond.facts.flush import FlushRequest, FlushResponse, Target
from gpumond.facts.frame import Alert
from gpumond.features.alerts.action_decisions import ACTION_ANNOTATION
from gpumond.features.alerts.dispatcher import AlertDispatcher
from gpumond.store.audit import AuditEntry
from tests.helpers.scripted_programs import ScriptedPrograms, train
from tests.helpers.values import make_snapshot

RULE = Rule(name="waste", scope="device", value="reclaimable_ratio", above=0.3, action=Action(cooldown_seconds=100.0))
ALERT = Alert(
    rule="waste",
    phase="firing",
    labels=(("alertname", "waste"),),
    annotations=(),
    value=0.5,
    active_at=1.0,
    fired_at=2.0,
)


class MemoryStore:
    """In-memory store."""

    writable = True

    def __init__(self) -> None:
        self.audited: list[tuple[str, Any]] = []

    async def audit(self, actor: str, action: str, detail: Any) -> None:
        self.audited.append((action, detail))

    async def audit_entries(self) -> list[AuditEntry]:
        return []

    async def past_alerts(self) -> list[Alert]:
        return []

    async def stored_alerts(self) -> tuple[list[StoredAlert], ClockTimes | None]:
        return [], None

    def store_alerts(
        self, alerts: Iterable[StoredAlert], notices: Sequence[Notification], over: Sequence[Alert]
    ) -> Awaitable[None]:
        return asyncio.sleep(0)


class SilentOutbox:
    """Outbox that sends nothing."""

    def put(self, alerts: Iterable[Alert], news: Mapping[Labels, Alert]) -> list[Notification]:
        return []


async def action_note(
    scripted: ScriptedPrograms, flush: Callable[[FlushRequest, str], Awaitable[FlushResponse]], text: str
) -> str:
    """Wait until the alert's annotation contains ``text``, and return it."""
    dispatcher = AlertDispatcher(MemoryStore(), SilentOutbox(), flush, 0.0)
    while True:
        snapshot = make_snapshot(reports=tuple(scripted.programs))
        dispatch = dispatcher.decide([RULE], [ALERT], snapshot, {})
        dispatcher.execute(dispatch)
        (alert,) = dispatch.alerts
        note = dict(alert.annotations).get(ACTION_ANNOTATION, "")
        if text in note:
            return note
        await asyncio.sleep(0)


@pytest.mark.parametrize("busy", [False, True], ids=["silent", "busy with its own flush"])
def test_programs_of_another_user_do_not_delay_a_rules_flush(busy: bool):
    async def run() -> tuple[str, list[int]]:
        others = [train(pid, uid=7, workload=f"w{pid}", cached=1) for pid in (1, 2, 3)]
        scripted = ScriptedPrograms(*others, train(10), train(11))
        scripted.silent = {report.pid for report in others}
        flusher = scripted.flusher(max_neighbor_wait_seconds=0.05)
        own = FlushRequest(target=Target(all=True, uid=7))
        task = asyncio.create_task(flusher.flush(own, "uid:7")) if busy else None
        await asyncio.sleep(0)
        note = await asyncio.wait_for(action_note(scripted, flusher.flush, "flushed train"), 30)
        for other in {task, *asyncio.all_tasks()} - {None, asyncio.current_task()}:
            other.cancel()
        return note, [pid for pid in scripted.flushed if pid >= 10]

    note, flushed = asyncio.run(run())
    assert sorted(flushed) == [10, 11]
    assert "6.0 GiB released, 6.0 GiB expected" in note


def test_error_of_one_process_is_in_its_receipt_and_others_are_flushed():
    async def run() -> str:
        scripted = ScriptedPrograms(train(10), train(11, device="GPU-b", workload="serve"))
        scripted.silent = {10}
        flusher = scripted.flusher()
        hanging = asyncio.create_task(flusher.flush(FlushRequest(target=Target(pid=10)), "test"))
        while not scripted.flushed:
            await asyncio.sleep(0)

        async def flush(request: FlushRequest, requested_by: str) -> FlushResponse:
            assert request.by_rule
            return await flusher.flush(request, requested_by)

        note = await asyncio.wait_for(action_note(scripted, flush, "flush"), 30)
        hanging.cancel()
        return note

    assert "flushed train, serve: 3.0 GiB released" in asyncio.run(run())
