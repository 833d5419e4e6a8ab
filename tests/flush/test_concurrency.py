"""Concurrent flushes: of one process, of neighbors on a device, of two users."""

from __future__ import annotations

import asyncio

import pytest

from gpumond.facts.errors import CooldownActive, FlushInProgress
from gpumond.facts.flush import FlushRequest, FlushResponse, Target
from gpumond.facts.messages import FlushCommand, FlushResult
from gpumond.facts.pools import FlushOutcome, with_option_names
from gpumond.facts.snapshot import AgentReport
from gpumond.features.flush.flusher import Flusher, FlushLocks
from gpumond.host.peer import PeerIdentity
from tests.helpers import virtual_time
from tests.helpers.scripted_programs import ScriptedPrograms, release_all, train


async def started_flush(scripted: ScriptedPrograms, flusher: Flusher, pid: int) -> asyncio.Task[FlushResponse]:
    """Start a flush of the process and wait until its agent has received it."""
    task = asyncio.create_task(flusher.flush(FlushRequest(target=Target(pid=pid)), "test"))
    while pid not in scripted.flushed:
        await asyncio.sleep(0)
    return task


async def cancelled(task: asyncio.Task[FlushResponse]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_plan_takes_no_lock_and_waits_for_none():
    async def run() -> list[str]:
        scripted = ScriptedPrograms(train(10), train(11))
        scripted.silent = {10}
        flusher = scripted.flusher()
        hanging = await started_flush(scripted, flusher, 10)
        scripted.silent = set()
        planned = await flusher.flush(FlushRequest(target=Target(all=True), dry_run=True), "test")
        scripted.silent = {11}
        plan = asyncio.create_task(flusher.flush(FlushRequest(target=Target(pid=11), dry_run=True), "test"))
        while scripted.running < 2:
            await asyncio.sleep(0)
        scripted.silent = set()
        await cancelled(hanging)
        flushed = await flusher.flush(FlushRequest(target=Target(pid=11)), "test")
        await cancelled(plan)
        return [receipt.outcome for answer in (planned, flushed) for receipt in answer.receipts]

    assert asyncio.run(run()) == ["planned", "planned", "freed"]


def test_programs_with_a_flush_in_progress_are_refused_and_others_flushed():
    async def run() -> None:
        scripted = ScriptedPrograms(train(10), train(11, device="GPU-b", workload="serve"))
        scripted.silent = {10}
        flusher = scripted.flusher()
        hanging = await started_flush(scripted, flusher, 10)
        both = await flusher.flush(FlushRequest(target=Target(all=True)), "test")
        assert {receipt.pid: receipt.outcome for receipt in both.receipts} == {10: "refused", 11: "freed"}
        (busy,) = (await flusher.flush(FlushRequest(target=Target(device="GPU-a")), "test")).receipts
        assert (busy.outcome, "in progress" in busy.reason) == ("refused", True)
        with pytest.raises(FlushInProgress):
            await flusher.flush(FlushRequest(target=Target(pid=10)), "test")
        await cancelled(hanging)

    asyncio.run(run())


def test_silent_agents_of_another_user_do_not_delay_a_flush():
    async def run() -> list[FlushOutcome]:
        silent = [train(pid, uid=7, workload=f"w{pid}") for pid in range(20, 24)]
        scripted = ScriptedPrograms(*silent, train(10))
        scripted.silent = {report.pid for report in silent}
        flusher = scripted.flusher(max_neighbor_wait_seconds=0.05)
        other_flush = asyncio.create_task(flusher.flush(FlushRequest(target=Target(all=True, uid=7)), "uid:7"))
        while not scripted.flushed:
            await asyncio.sleep(0)
        own = await flusher.flush(FlushRequest(target=Target(pid=10)), "test")
        await cancelled(other_flush)
        return [receipt.outcome for receipt in own.receipts]

    assert asyncio.run(run()) == ["freed"]


def test_process_can_be_flushed_again_when_its_part_of_a_flush_has_ended():
    async def run() -> None:
        scripted = ScriptedPrograms(train(10), train(20, device="GPU-b", uid=7))
        scripted.silent = {20}
        flusher = scripted.flusher()
        everything = asyncio.create_task(flusher.flush(FlushRequest(target=Target(all=True)), "root"))
        while len(scripted.flushed) < 2 or scripted.running > 1:
            await asyncio.sleep(0)
        for _ in range(50):
            await asyncio.sleep(0)
        scripted.refill()
        answer = await flusher.flush(FlushRequest(target=Target(pid=10), force=True), "test")
        assert [receipt.outcome for receipt in answer.receipts] == ["freed"]
        await cancelled(everything)

    asyncio.run(run())


@pytest.mark.parametrize(("by_rule", "cooldown"), [(False, 5.0), (True, 30.0)])
def test_cooldown_is_5_seconds_for_users_and_30_for_rules(by_rule: bool, cooldown: float):
    async def run() -> None:
        scripted, now = ScriptedPrograms(train()), [1000.0]
        flusher = scripted.flusher(clock=lambda: now[0])
        request = FlushRequest(target=Target(pid=10), by_rule=by_rule)
        await flusher.flush(request, "test")
        now[0] += cooldown - 1
        with pytest.raises(CooldownActive, match="try again in 1 s") as refused:
            await flusher.flush(request, "test")
        assert str(refused.value).endswith(', or now with "force": true')
        assert with_option_names(str(refused.value)).endswith(", or now with --force")
        assert refused.value.retry_after_seconds == 1
        now[0] += 1.5
        scripted.refill()
        assert (await flusher.flush(request, "test")).receipts[0].outcome == "freed"

    asyncio.run(run())


def test_force_overrides_the_cooldown():
    async def run() -> None:
        scripted = ScriptedPrograms(train())
        flusher = scripted.flusher()
        await flusher.flush(FlushRequest(target=Target(pid=10)), "test")
        scripted.refill()
        forced = await flusher.flush(FlushRequest(target=Target(pid=10), force=True), "test")
        assert forced.receipts[0].outcome == "freed"

    asyncio.run(run())


def test_flush_without_effect_starts_no_cooldown():
    def nothing(scripted: ScriptedPrograms, identity: PeerIdentity, request: FlushCommand) -> FlushResult:
        return FlushResult(request.id, "nothing", "torch has none of the steps spill", (), ())

    async def run() -> list[FlushOutcome]:
        scripted = ScriptedPrograms(train(), respond=nothing)
        flusher = scripted.flusher()
        idle = await flusher.flush(FlushRequest(target=Target(pid=10), steps=("spill",)), "test")
        scripted.respond = release_all
        after = await flusher.flush(FlushRequest(target=Target(pid=10)), "test")
        return [idle.receipts[0].outcome, after.receipts[0].outcome]

    assert asyncio.run(run()) == ["nothing", "freed"]


def test_neighbors_delay_the_flushes_of_a_user_once_in_total():
    reports = [train(10), train(11)]

    async def flush() -> None:
        locks, over = FlushLocks(max_neighbor_wait_seconds=5.0), asyncio.Event()

        async def silent() -> None:
            async with locks.hold(train(20, uid=7)):
                await over.wait()

        async def own(report: AgentReport) -> None:
            async with locks.hold(report):
                pass

        other_flush = asyncio.create_task(silent())
        await asyncio.sleep(0)
        await asyncio.gather(*map(own, reports))
        over.set()
        await other_flush

    _, waited = virtual_time.run(flush())
    assert waited == pytest.approx(5.0, abs=0.1)
