"""Flusher with scripted agents and a scripted driver: plan, execution, verification and receipt."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from gpumond.facts.errors import CONDITION_REMEDIES, CooldownActive, FlushInProgress, NoSuchTarget
from gpumond.facts.flush import FlushRequest, Target
from gpumond.facts.messages import FlushCommand, FlushResult, PoolChange
from gpumond.facts.pools import ExpectedRelease, FlushOutcome, Receipt, StepResult
from gpumond.facts.program import Program
from gpumond.facts.snapshot import AgentReport
from gpumond.host.peer import PeerIdentity
from tests.helpers.agents import GIB
from tests.helpers.scripted_programs import ScriptedPrograms, release_all, train
from tests.helpers.values import make_pool, make_report

RANK = Program(distributed=True)


def test_receipt_has_released_bytes_of_allocator_and_driver():
    answer = ScriptedPrograms(train()).run()
    (receipt,) = answer.receipts
    assert (receipt.outcome, receipt.released_bytes, receipt.driver_released_bytes) == ("freed", 3 * GIB, 3 * GIB)
    assert receipt.expected == ExpectedRelease(3 * GIB, 3 * GIB, 3 * GIB)
    assert receipt.before is not None
    assert receipt.after is not None
    assert (receipt.before.held_bytes, receipt.before.driver_used_bytes) == (4 * GIB, 5 * GIB)
    assert (receipt.after.held_bytes, receipt.after.driver_used_bytes) == (GIB, 2 * GIB)
    assert (receipt.pid, receipt.allocator, receipt.requested_by) == (10, "torch", "test")
    assert answer.released_bytes == 3 * GIB


def test_slow_driver_is_waited_for():
    (receipt,) = ScriptedPrograms(train(), lag=4).run().receipts
    assert (receipt.outcome, receipt.driver_released_bytes) == ("freed", 3 * GIB)


def test_release_that_the_driver_does_not_see_is_partial():
    (receipt,) = ScriptedPrograms(train(), lag=10**6).run().receipts
    assert (receipt.outcome, receipt.released_bytes, receipt.driver_released_bytes) == ("partial", 3 * GIB, 0)
    assert "driver counts only 0" in receipt.reason


def test_allocation_during_the_flush_is_a_race_and_not_partial():
    def release_and_allocate(scripted: ScriptedPrograms, identity: PeerIdentity, request: FlushCommand) -> FlushResult:
        result = release_all(scripted, identity, request)
        scripted.driver_counts[10, "GPU-a"] += GIB
        scripted.programs = [make_report(10, pools=(make_pool(live=2 * GIB, device_allocations=1),))]
        return result

    (receipt,) = ScriptedPrograms(train(), respond=release_and_allocate).run().receipts
    assert (receipt.outcome, receipt.raced) == ("freed", True)
    assert (receipt.released_bytes, receipt.driver_released_bytes) == (3 * GIB, 2 * GIB)


def test_plan_changes_nothing():
    scripted = ScriptedPrograms(train())
    (receipt,) = scripted.run(dry_run=True).receipts
    assert (receipt.outcome, receipt.released_bytes, receipt.after) == ("planned", 0, None)
    assert receipt.expected == ExpectedRelease(3 * GIB, 3 * GIB, 3 * GIB)
    assert scripted.driver_counts == {(10, "GPU-a"): 5 * GIB}


def test_unanswered_flush_is_a_timeout():
    (receipt,) = ScriptedPrograms(train(), respond=lambda *_: None).run().receipts
    assert receipt.outcome == "timeout"


def test_refusal_is_in_the_receipt_with_its_reason():
    def refuse_flush(scripted: ScriptedPrograms, identity: PeerIdentity, request: FlushCommand) -> FlushResult:
        return FlushResult(request.id, "refused", "a CUDA graph is being captured")

    (receipt,) = ScriptedPrograms(train(), respond=refuse_flush).run().receipts
    assert (receipt.outcome, receipt.reason) == ("refused", "a CUDA graph is being captured")


def test_program_with_less_than_the_minimum_is_not_flushed():
    scripted = ScriptedPrograms(train(10, cached=GIB), train(11, cached=3 * GIB))
    answer = scripted.run(min_reclaimable_bytes=2 * GIB)
    assert scripted.flushed == [11]
    assert {receipt.pid: receipt.outcome for receipt in answer.receipts} == {10: "nothing", 11: "freed"}


def test_allocators_of_a_process_each_have_a_receipt():
    pools = (make_pool(cached=GIB), make_pool(allocator="cupy", cached=2 * GIB))
    scripted = ScriptedPrograms(make_report(pools=pools))
    scripted.driver_counts = {(10, "GPU-a"): 4 * GIB}
    answer = scripted.run()
    assert [(r.allocator, r.released_bytes, r.driver_released_bytes) for r in answer.receipts] == [
        ("torch", GIB, GIB),
        ("cupy", 2 * GIB, 2 * GIB),
    ]


OTHER = {"device": "GPU-b", "workload": "serve"}


@pytest.mark.parametrize(
    ("reports", "at_once"),
    [
        pytest.param((train(10), train(11, workload="serve")), 1, id="one device"),
        pytest.param((train(10), train(11, workload="serve", uid=7)), 1, id="one device, two users"),
        pytest.param((train(10), train(11, **OTHER)), 2, id="nothing in common"),
        pytest.param((train(10), train(11, device="GPU-b")), 1, id="one workload"),
        pytest.param((train(10), train(11, device="GPU-b", uid=7)), 2, id="one name, two users"),
        pytest.param((train(10, program=RANK), train(11, program=RANK, **OTHER)), 1, id="ranks"),
        pytest.param((train(10, program=RANK), train(11, program=RANK, uid=7, **OTHER)), 2, id="ranks of two users"),
        pytest.param((train(10, program=RANK), train(11, **OTHER)), 2, id="a rank and another program"),
    ],
)
def test_programs_with_a_common_device_workload_or_job_are_flushed_in_succession(
    reports: Sequence[AgentReport], at_once: int
):
    async def most_concurrent_flushes() -> int:
        scripted = ScriptedPrograms(*reports)
        scripted.gate = asyncio.Event()
        flush = asyncio.create_task(scripted.flusher().flush(FlushRequest(target=Target(all=True)), "test"))
        for _ in range(50):
            await asyncio.sleep(0)
        scripted.gate.set()
        await flush
        return scripted.most_running

    assert asyncio.run(most_concurrent_flushes()) == at_once


def test_unanswered_flush_of_a_rank_blocks_the_other_ranks_until_it_is_answered():
    first, second = train(10, program=RANK), train(11, device="GPU-b", program=RANK)
    scripted = ScriptedPrograms(
        first,
        second,
        respond=lambda scripted, identity, command: (
            None if identity.pid == 10 else release_all(scripted, identity, command)
        ),
    )
    scripted.unanswered = {PeerIdentity(10, 100, 1000)}

    async def run() -> list[FlushOutcome]:
        flusher = scripted.flusher()
        together = await flusher.flush(FlushRequest(target=Target(all=True)), "test")
        later = await flusher.flush(FlushRequest(target=Target(pid=11)), "test")
        scripted.unanswered.clear()
        last = await flusher.flush(FlushRequest(target=Target(pid=11)), "test")
        return [receipt.outcome for answer in (together, later, last) for receipt in answer.receipts]

    assert asyncio.run(run()) == ["timeout", "refused", "refused", "freed"]


def test_receipt_names_a_refilled_flush():
    def refill(scripted: ScriptedPrograms, identity: PeerIdentity, command: FlushCommand) -> FlushResult:
        result = release_all(scripted, identity, command)
        scripted.programs = [train(cached=3 * GIB, refilled_flushes=1)]
        return result

    (receipt,) = ScriptedPrograms(train(), respond=refill).run().receipts
    assert (receipt.outcome, receipt.released_bytes) == ("freed", 3 * GIB)
    assert "refilled" in receipt.reason


def test_process_has_one_flush_at_a_time_and_then_a_cooldown():
    async def run() -> None:
        scripted = ScriptedPrograms(train())
        scripted.gate = asyncio.Event()
        flusher = scripted.flusher()
        request = FlushRequest(target=Target(pid=10))
        first = asyncio.create_task(flusher.flush(request, "test"))
        for _ in range(10):
            await asyncio.sleep(0)
        with pytest.raises(FlushInProgress):
            await flusher.flush(request, "test")
        scripted.gate.set()
        await first
        with pytest.raises(CooldownActive) as refused:
            await flusher.flush(request, "test")
        assert 0 < refused.value.retry_after_seconds <= 30
        planned = await flusher.flush(FlushRequest(target=Target(pid=10), dry_run=True), "test")
        assert planned.receipts[0].outcome == "planned"

    asyncio.run(run())


def test_programs_in_cooldown_are_refused_and_others_flushed():
    async def run() -> None:
        scripted = ScriptedPrograms(train(10), train(11))
        flusher = scripted.flusher()
        await flusher.flush(FlushRequest(target=Target(pid=10)), "test")
        answer = await flusher.flush(FlushRequest(target=Target(all=True)), "test")
        assert {receipt.pid: receipt.outcome for receipt in answer.receipts} == {10: "refused", 11: "freed"}

    asyncio.run(run())


@pytest.mark.parametrize(
    ("target", "pids"),
    [
        (Target(pid=10), [10]),
        (Target(device="GPU-b"), [11]),
        (Target(workload="serve"), [11]),
        (Target(all=True), [10, 11]),
        (Target(pid=12), None),
        (Target(device="GPU-c"), None),
    ],
    ids=str,
)
def test_target_selects_processes(target: Target, pids: list[int] | None):
    serve = make_report(11, pools=(make_pool("GPU-b", cached=GIB),), workload="serve")
    scripted = ScriptedPrograms(train(10), serve)
    if pids is None:
        with pytest.raises(NoSuchTarget, match=str(target)):
            scripted.run(target=target)
    else:
        scripted.run(target=target)
        assert sorted(scripted.flushed) == pids


def test_process_without_a_pool_has_the_outcome_nothing():
    (receipt,) = ScriptedPrograms(make_report()).run().receipts
    assert receipt.outcome == "nothing"


def test_receipt_contains_the_plan():
    async def run() -> None:
        scripted = ScriptedPrograms(train())
        flusher = scripted.flusher()
        plan = await flusher.flush(FlushRequest(target=Target(pid=10), dry_run=True), "test")
        scripted.programs = [train(cached=2 * GIB)]
        carried_out = FlushRequest(target=Target(pid=10), plan=plan.id)
        receipts = (await flusher.flush(carried_out, "test")).receipts
        (receipt,) = receipts
        assert receipt.planned == ExpectedRelease(3 * GIB, 3 * GIB, 3 * GIB)
        assert (receipt.expected, receipt.released_bytes) == (ExpectedRelease(2 * GIB, 2 * GIB, 2 * GIB), 2 * GIB)
        scripted.refill()
        (other,) = (await flusher.flush(replace(carried_out, force=True), "another")).receipts
        assert other.planned is None

    asyncio.run(run())


@pytest.mark.parametrize(
    ("before", "after", "driver", "text"),
    [
        (2 * GIB, 62 * GIB, 70 * GIB, "the pool holds 60.0 GiB more than before"),
        (60 * GIB, GIB, 5 * GIB, "59.0 GiB released isn't counted, because the driver counted only 5.0 GiB"),
        (600 * GIB, GIB, None, "599.0 GiB released isn't counted, because the GPU has only 80.0 GiB"),
    ],
)
def test_impossible_release_counts_as_zero(before: int, after: int, driver: int | None, text: str):
    def report_impossible_release(
        scripted: ScriptedPrograms, identity: PeerIdentity, request: FlushCommand
    ) -> FlushResult:
        change = PoolChange(make_pool(live=before), make_pool(live=after), ExpectedRelease(0, 0, 0))
        return FlushResult(request.id, "freed", "", (change,), ())

    scripted = ScriptedPrograms(train(), train(11), respond=report_impossible_release)
    scripted.driver_counts = {(11, "GPU-a"): GIB} | ({} if driver is None else {(10, "GPU-a"): driver})
    answer = scripted.run(target=Target(pid=10))
    (receipt,) = answer.receipts
    assert (receipt.outcome, receipt.released_bytes, answer.released_bytes) == ("nothing", 0, 0)
    assert text in receipt.reason


def test_release_of_managed_memory_is_not_compared_with_the_drivers_count():
    def free(scripted: ScriptedPrograms, identity: PeerIdentity, request: FlushCommand) -> FlushResult:
        before = make_pool(allocator="managed", live=GIB, cached=60 * GIB, managed=True)
        after = make_pool(allocator="managed", live=GIB, managed=True)
        change = PoolChange(before, after, ExpectedRelease(0, 60 * GIB, 60 * GIB))
        return FlushResult(request.id, "freed", "", (change,), ())

    pool = make_pool(allocator="managed", live=GIB, cached=60 * GIB, managed=True)
    scripted = ScriptedPrograms(make_report(pools=(pool,)), respond=free)
    scripted.driver_counts = {(10, "GPU-a"): GIB // 2}
    (receipt,) = scripted.run().receipts
    assert (receipt.outcome, receipt.released_bytes, receipt.driver_released_bytes) == ("freed", 60 * GIB, None)


def test_receipt_of_a_pool_with_unknown_live_bytes_names_the_remedy():
    def keep(scripted: ScriptedPrograms, identity: PeerIdentity, request: FlushCommand) -> FlushResult:
        (pool,) = next(report for report in scripted.programs if report.pid == identity.pid).pools
        change = PoolChange(pool, pool, ExpectedRelease(0, 0, 0, "not_releasable"))
        return FlushResult(request.id, "planned" if request.dry_run else "nothing", "", (change,), ())

    unknown = make_pool(allocator="rmm", live_bytes=None, held_bytes=4 * GIB)
    scripted = ScriptedPrograms(make_report(pools=(unknown,)), respond=keep)
    for dry_run in (True, False):
        (receipt,) = scripted.run(dry_run=dry_run).receipts
        assert receipt.before is not None
        assert (receipt.before.live_bytes, receipt.before.held_bytes) == (None, 4 * GIB)
        assert receipt.reason == CONDITION_REMEDIES["live_unknown"]


def test_flush_of_a_pool_without_cache_states_why_it_released_nothing():
    def keep(scripted: ScriptedPrograms, identity: PeerIdentity, request: FlushCommand) -> FlushResult:
        (pool,) = next(report for report in scripted.programs if report.pid == identity.pid).pools
        return FlushResult(request.id, "nothing", "", (PoolChange(pool, pool, ExpectedRelease(0, 0, 0)),), ())

    for stranded, reason in ((0, ""), (2 * GIB, "; 2.0 GiB stranded, which a flush can't release")):
        (receipt,) = (
            ScriptedPrograms(make_report(pools=(make_pool(live=GIB, stranded=stranded),)), respond=keep).run().receipts
        )
        assert (receipt.outcome, receipt.reason) == ("nothing", f"no cached bytes{reason}")


def test_receipts_contain_reported_pools_once_and_requested_steps_only():
    def report_foreign_pools(scripted: ScriptedPrograms, identity: PeerIdentity, request: FlushCommand) -> FlushResult:
        (own,) = release_all(scripted, identity, request).pools
        foreign = [replace(own, before=make_pool(f"GPU-{n}"), after=make_pool(f"GPU-{n}")) for n in range(50)]
        other = replace(own, before=replace(own.before, allocator="cupy"))
        steps = tuple(StepResult(step, 0, 0.1) for step in ("cache", "gc", "cache", "bogus"))
        return FlushResult(request.id, "freed", "", (*foreign, other, own, own), steps)

    (receipt,) = ScriptedPrograms(train(), respond=report_foreign_pools).run().receipts
    assert (receipt.device_uuid, receipt.released_bytes) == ("GPU-a", 3 * GIB)
    assert [step.step for step in receipt.steps] == ["cache"]


def test_timeout_of_one_allocator_skips_the_other_allocators():
    pools = tuple(make_pool(allocator=f"a{n}", cached=GIB) for n in range(5))
    scripted = ScriptedPrograms(make_report(pools=pools), respond=lambda *_: None)
    scripted.driver_counts = {}
    assert [receipt.outcome for receipt in scripted.run().receipts] == ["timeout"]
    assert len(scripted.flushed) == 1


def test_reasons_have_readable_sizes():
    (receipt,) = ScriptedPrograms(train(cached=GIB)).run(min_reclaimable_bytes=100 * GIB).receipts
    assert receipt.reason == "1.0 GiB is reclaimable, less than the requested minimum of 100.0 GiB"


def call_functions(scripted: ScriptedPrograms, identity: PeerIdentity, command: FlushCommand) -> FlushResult:
    if command.dry_run:
        return FlushResult(command.id, "planned")
    scripted.unread_releases.append((identity.pid, "GPU-a", GIB))
    return FlushResult(command.id, "nothing", "", (), (StepResult("hooks", 0, 0.1),))


def test_functions_of_a_program_without_a_pool_have_the_drivers_count():
    scripted = ScriptedPrograms(make_report(), respond=call_functions, lag=5)
    scripted.driver_counts = {(10, "GPU-a"): 5 * GIB, (10, "GPU-b"): GIB}
    (plan,) = scripted.run(steps=("hooks",), dry_run=True).receipts
    answer = scripted.run(steps=("hooks",))
    assert (plan.outcome, plan.allocator, plan.driver_released_bytes) == ("planned", None, None)
    assert [
        (receipt.device_uuid, receipt.allocator, receipt.outcome, receipt.driver_released_bytes, receipt.steps[0].step)
        for receipt in answer.receipts
    ] == [("GPU-a", None, "freed", GIB, "hooks"), ("GPU-b", None, "nothing", 0, "hooks")]
    assert answer.released_bytes == GIB


def test_agent_of_an_earlier_version_refuses_functions_without_a_pool():
    def refuse(scripted: ScriptedPrograms, identity: PeerIdentity, command: FlushCommand) -> FlushResult:
        return FlushResult(command.id, "refused", f"no allocator {command.allocator!r} in this process")

    (receipt,) = ScriptedPrograms(make_report(), respond=refuse).run(steps=("hooks",)).receipts
    assert (receipt.outcome, receipt.reason) == ("refused", "no allocator '' in this process")


@pytest.mark.parametrize("suspended", [False, True])
def test_plan_leaves_no_receipt(suspended: bool):
    scripted, noted = ScriptedPrograms(train(suspended=suspended)), list[Receipt]()
    flusher = scripted.flusher(on_receipt=noted.append)
    answer = asyncio.run(flusher.flush(FlushRequest(target=Target(all=True), dry_run=True), "test"))
    assert [receipt.outcome for receipt in answer.receipts] == ["deferred" if suspended else "planned"]
    assert (noted, [*flusher.receipts]) == ([], [])
