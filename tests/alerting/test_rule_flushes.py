"""A rule's action among the programs of two users: each process by itself, whatever the others do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest

from gpumond.alerting.dispatcher import AlertDispatcher
from gpumond.flush import FlushOutcome, FlushRequest, Target
from gpumond.model.frame import Alert
from gpumond.model.persisted import Heartbeat, KeptAlert, Labels, Notice
from gpumond.rules import Action, Rule
from gpumond.rules.actions import ANNOTATION
from gpumond.store.audit_chain import AuditEntry
from gpumond.testing import make_snapshot
from tests.flush.test_flush import Scene, train

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


class Kept:
    """A store in memory."""

    writable = True

    def __init__(self) -> None:
        self.audited: list[tuple[str, Any]] = []

    async def audit(self, actor: str, action: str, detail: Any) -> None:
        self.audited.append((action, detail))

    async def audit_entries(self) -> list[AuditEntry]:
        return []

    async def past_alerts(self) -> list[Alert]:
        return []

    async def kept(self) -> tuple[list[KeptAlert], Heartbeat | None]:
        return [], None

    def keep(self, alerts: Iterable[KeptAlert], notices: Sequence[Notice], over: Sequence[Alert]) -> Awaitable[None]:
        return asyncio.sleep(0)


class SilentOutbox:
    """An outbox that sends nothing."""

    def put(self, alerts: Iterable[Alert], news: Mapping[Labels, Alert]) -> list[Notice]:
        return []


async def noted(scene: Scene, flush: Callable[[FlushRequest, str], Awaitable[FlushOutcome]], says: str) -> str:
    """The alert's annotation once it says so."""
    dispatcher = AlertDispatcher(Kept(), SilentOutbox(), flush, 0.0)
    while True:
        snapshot = make_snapshot(reports=tuple(scene.programs))
        dispatch = dispatcher.decide([RULE], [ALERT], snapshot, {})
        dispatcher.execute(dispatch)
        (alert,) = dispatch.alerts
        note = dict(alert.annotations).get(ANNOTATION, "")
        if says in note:
            return note
        await asyncio.sleep(0)


@pytest.mark.parametrize("busy", [False, True], ids=["silent", "busy with a flush of its own"])
def test_another_users_programs_do_not_keep_mine_from_being_flushed(busy: bool):
    async def run() -> tuple[str, list[int]]:
        theirs = [train(pid, uid=7, workload=f"w{pid}", cached=1) for pid in (1, 2, 3)]
        scene = Scene(*theirs, train(10), train(11))
        scene.silent = {report.pid for report in theirs}
        flusher = scene.flusher(neighbour_seconds=0.05)
        own = FlushRequest(target=Target(all=True, uid=7))
        task = asyncio.create_task(flusher.flush(own, "uid:7")) if busy else None
        await asyncio.sleep(0)
        note = await asyncio.wait_for(noted(scene, flusher.flush, "flushed train"), 30)
        for other in {task, *asyncio.all_tasks()} - {None, asyncio.current_task()}:
            other.cancel()
        return note, [pid for pid in scene.flushed if pid >= 10]

    note, flushed = asyncio.run(run())
    assert sorted(flushed) == [10, 11]
    assert "6.0 GiB released of 6.0 GiB expected" in note


def test_an_error_of_one_process_is_its_receipt_and_the_users_others_are_flushed():
    async def run() -> str:
        scene = Scene(train(10), train(11, device="GPU-b", workload="serve"))
        scene.silent = {10}
        flusher = scene.flusher()
        hanging = asyncio.create_task(flusher.flush(FlushRequest(target=Target(pid=10)), "test"))
        while not scene.flushed:
            await asyncio.sleep(0)

        async def flush(request: FlushRequest, requested_by: str) -> FlushOutcome:
            assert request.by_rule
            return await flusher.flush(request, requested_by)

        note = await asyncio.wait_for(noted(scene, flush, "flush"), 30)
        hanging.cancel()
        return note

    assert "flushed train, serve: 3.0 GiB released" in asyncio.run(run())
