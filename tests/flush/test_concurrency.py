"""Several flushes: of one process, of neighbours on a device, of two users."""

from __future__ import annotations

import asyncio

import pytest

from gpumond.errors import AlreadyUnderWay, CoolingDown
from gpumond.flush import Flusher, FlushOutcome, FlushRequest, Target
from gpumond.flush.locks import Locks
from gpumond.host.peer_credentials import Identity
from gpumond.model.pools import Outcome
from gpumond.model.snapshot import AgentReport
from gpumond.protocol.messages import FlushCommand, FlushResult
from tests import virtual_time
from tests.flush.test_flush import Scene, give_all, train


async def begun(scene: Scene, flusher: Flusher, pid: int) -> asyncio.Task[FlushOutcome]:
    """A flush of that process, once its agent has the order."""
    task = asyncio.create_task(flusher.flush(FlushRequest(target=Target(pid=pid)), "test"))
    while pid not in scene.flushed:
        await asyncio.sleep(0)
    return task


async def ended(task: asyncio.Task[FlushOutcome]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_a_plan_takes_no_lock_and_waits_for_none():
    async def run() -> list[str]:
        scene = Scene(train(10), train(11))
        scene.silent = {10}
        flusher = scene.flusher()
        hanging = await begun(scene, flusher, 10)
        scene.silent = set()
        planned = await flusher.flush(FlushRequest(target=Target(all=True), dry_run=True), "test")
        scene.silent = {11}
        plan = asyncio.create_task(flusher.flush(FlushRequest(target=Target(pid=11), dry_run=True), "test"))
        while scene.running < 2:
            await asyncio.sleep(0)
        scene.silent = set()
        await ended(hanging)
        flushed = await flusher.flush(FlushRequest(target=Target(pid=11)), "test")
        await ended(plan)
        return [receipt.outcome for answer in (planned, flushed) for receipt in answer.receipts]

    assert asyncio.run(run()) == ["planned", "planned", "freed"]


def test_of_several_targets_those_under_way_are_refused_and_the_others_flushed():
    async def run() -> None:
        scene = Scene(train(10), train(11, device="GPU-b", workload="serve"))
        scene.silent = {10}
        flusher = scene.flusher()
        hanging = await begun(scene, flusher, 10)
        both = await flusher.flush(FlushRequest(target=Target(all=True)), "test")
        assert {receipt.pid: receipt.outcome for receipt in both.receipts} == {10: "refused", 11: "freed"}
        (busy,) = (await flusher.flush(FlushRequest(target=Target(device="GPU-a")), "test")).receipts
        assert (busy.outcome, "under way" in busy.reason) == ("refused", True)
        with pytest.raises(AlreadyUnderWay):
            await flusher.flush(FlushRequest(target=Target(pid=10)), "test")
        await ended(hanging)

    asyncio.run(run())


def test_another_users_silent_agents_do_not_hold_up_a_flush():
    async def run() -> list[Outcome]:
        silent = [train(pid, uid=7, workload=f"w{pid}") for pid in range(20, 24)]
        scene = Scene(*silent, train(10))
        scene.silent = {report.pid for report in silent}
        flusher = scene.flusher(neighbour_seconds=0.05)
        theirs = asyncio.create_task(flusher.flush(FlushRequest(target=Target(all=True, uid=7)), "uid:7"))
        while not scene.flushed:
            await asyncio.sleep(0)
        mine = await flusher.flush(FlushRequest(target=Target(pid=10)), "test")
        await ended(theirs)
        return [receipt.outcome for receipt in mine.receipts]

    assert asyncio.run(run()) == ["freed"]


def test_a_process_is_free_again_when_its_own_part_of_a_flush_is_over():
    async def run() -> None:
        scene = Scene(train(10), train(20, device="GPU-b", uid=7))
        scene.silent = {20}
        flusher = scene.flusher()
        everything = asyncio.create_task(flusher.flush(FlushRequest(target=Target(all=True)), "root"))
        while len(scene.flushed) < 2 or scene.running > 1:
            await asyncio.sleep(0)
        for _ in range(50):
            await asyncio.sleep(0)
        scene.refill()
        answer = await flusher.flush(FlushRequest(target=Target(pid=10), force=True), "test")
        assert [receipt.outcome for receipt in answer.receipts] == ["freed"]
        await ended(everything)

    asyncio.run(run())


@pytest.mark.parametrize(("by_rule", "rests"), [(False, 5.0), (True, 30.0)])
def test_a_process_rests_five_seconds_for_people_and_thirty_for_rules(by_rule: bool, rests: float):
    async def run() -> None:
        scene, now = Scene(train()), [1000.0]
        flusher = scene.flusher(clock=lambda: now[0])
        request = FlushRequest(target=Target(pid=10), by_rule=by_rule)
        await flusher.flush(request, "test")
        now[0] += rests - 1
        with pytest.raises(CoolingDown, match="allowed again in 1 s") as refused:
            await flusher.flush(request, "test")
        assert "--force" in str(refused.value)
        assert refused.value.retry_after_seconds == 1
        now[0] += 1.5
        scene.refill()
        assert (await flusher.flush(request, "test")).receipts[0].outcome == "freed"

    asyncio.run(run())


def test_force_overrides_the_cooldown():
    async def run() -> None:
        scene = Scene(train())
        flusher = scene.flusher()
        await flusher.flush(FlushRequest(target=Target(pid=10)), "test")
        scene.refill()
        forced = await flusher.flush(FlushRequest(target=Target(pid=10), force=True), "test")
        assert forced.receipts[0].outcome == "freed"

    asyncio.run(run())


def test_a_flush_that_did_nothing_starts_no_cooldown():
    def nothing(scene: Scene, identity: Identity, request: FlushCommand) -> FlushResult:
        return FlushResult(request.id, "nothing", "torch has none of the steps spill", (), ())

    async def run() -> list[Outcome]:
        scene = Scene(train(), behave=nothing)
        flusher = scene.flusher()
        idle = await flusher.flush(FlushRequest(target=Target(pid=10), steps=("spill",)), "test")
        scene.behave = give_all
        after = await flusher.flush(FlushRequest(target=Target(pid=10)), "test")
        return [idle.receipts[0].outcome, after.receipts[0].outcome]

    assert asyncio.run(run()) == ["nothing", "freed"]


def test_neighbours_delay_a_flush_once_even_if_it_first_waited_for_another_of_its_user():
    reports = [train(10), train(11)]

    async def flush() -> None:
        locks, over = Locks(neighbour_seconds=5.0), asyncio.Event()

        async def silent() -> None:
            async with locks.held(train(20, uid=7)):
                await over.wait()

        async def own(report: AgentReport) -> None:
            async with locks.held(report):
                pass

        theirs = asyncio.create_task(silent())
        await asyncio.sleep(0)
        await asyncio.gather(*map(own, reports))
        over.set()
        await theirs

    _, waited = virtual_time.run(flush())
    assert waited == pytest.approx(5.0, abs=0.1)
