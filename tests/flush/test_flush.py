"""Plan, run, verify, receipt: the flusher between a scripted agent and a scripted driver."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from gpumond.errors import AlreadyUnderWay, CoolingDown, NoSuchTarget
from gpumond.flush import Flusher, FlushOutcome, FlushRequest, Target
from gpumond.flush.locks import identity_of
from gpumond.host.peer_credentials import Identity
from gpumond.model.cooperative import Steps
from gpumond.model.pools import Expected, Outcome, StepResult
from gpumond.model.program import Program
from gpumond.model.snapshot import AgentReport, Reading
from gpumond.protocol.messages import FlushCommand, FlushResult, PoolChange
from gpumond.testing import GIB, make_device, make_pool, make_process, make_report

Behave = Callable[["Scene", Identity, FlushCommand], FlushResult | None]


class Scene:
    """Programs on devices: an agent's flush changes what the driver counts, at once or after some readings."""

    def __init__(self, *reports: AgentReport, behave: Behave | None = None, lag: int = 0) -> None:
        self.programs = list(reports)
        self.behave = behave or give_all
        self.lag = lag
        self.flushed: list[int] = []
        self.running = 0
        self.most_running = 0
        self.driver_counts = {
            (report.pid, pool.device_uuid): pool.held_bytes + GIB for report in reports for pool in report.pools
        }
        self.coming: list[tuple[int, str, int]] = []
        self.gate: asyncio.Event | None = None
        self.silent: set[int] = set()
        """Pids whose agents never answer."""
        self.unanswered: set[Identity] = set()

    def reporting(self) -> Steps[Sequence[AgentReport]]:
        yield
        return self.programs

    def report(self, identity: Identity) -> AgentReport | None:
        return next((report for report in self.programs if identity_of(report) == identity), None)

    async def flush(self, identity: Identity, request: FlushCommand) -> FlushResult | None:
        self.flushed.append(identity.pid)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        if identity.pid in self.silent:
            await asyncio.Event().wait()
        await (self.gate.wait() if self.gate else asyncio.sleep(0))
        self.running -= 1
        return self.behave(self, identity, request)

    def flushing(self, identity: Identity) -> bool:
        return identity in self.unanswered

    async def read_driver(self) -> Reading | None:
        if self.lag:
            self.lag -= 1
        else:
            while self.coming:
                pid, device, freed = self.coming.pop()
                self.driver_counts[pid, device] -= freed
        devices = {device for _, device in self.driver_counts}
        return Reading(
            devices=tuple(
                make_device(
                    uuid,
                    processes=tuple(
                        make_process(pid, used_bytes=used)
                        for (pid, on), used in self.driver_counts.items()
                        if on == uuid
                    ),
                )
                for uuid in sorted(devices)
            )
        )

    def refill(self) -> None:
        """The programs have taken again what was flushed."""
        for report in self.programs:
            for pool in report.pools:
                self.driver_counts[report.pid, pool.device_uuid] = pool.held_bytes + GIB

    def flusher(self, **options: Any) -> Flusher:
        return Flusher(self, self.read_driver, **{"settle_seconds": 0.5} | options)

    def run(self, **fields: object) -> FlushOutcome:
        request = FlushRequest(**({"target": Target(all=True)} | fields))  # type: ignore[arg-type]
        return asyncio.run(self.flusher().flush(request, "test"))


def give_all(scene: Scene, identity: Identity, request: FlushCommand) -> FlushResult:
    """An agent whose pools return exactly what they promised."""
    changes = []
    report = next(report for report in scene.programs if report.pid == identity.pid)
    for pool in report.pools:
        if pool.allocator == request.allocator:
            likely = pool.reclaimable.likely
            after = make_pool(pool.device_uuid, live=pool.live_bytes, stranded=pool.stranded_bytes)
            if not request.dry_run:
                scene.coming.append((identity.pid, pool.device_uuid, likely))
            changes.append(PoolChange(pool, pool if request.dry_run else after, Expected(likely, likely, likely)))
    outcome: Outcome = "planned" if request.dry_run else "freed"
    return FlushResult(request.id, outcome, "", tuple(changes), (StepResult("cache", 0, 0.1),))


def train(
    pid: int = 10, cached: int = 3 * GIB, device: str = "GPU-a", thrashes: int = 0, **fields: object
) -> AgentReport:
    return make_report(pid, pools=(make_pool(device, live=GIB, cached=cached, thrashes=thrashes),), **fields)


RANK = Program(distributed=True)


def test_a_receipt_proves_what_came_back_at_the_allocator_and_at_the_driver():
    answer = Scene(train()).run()
    (receipt,) = answer.receipts
    assert (receipt.outcome, receipt.released_bytes, receipt.driver_released_bytes) == ("freed", 3 * GIB, 3 * GIB)
    assert receipt.expected == Expected(3 * GIB, 3 * GIB, 3 * GIB)
    assert receipt.before is not None
    assert receipt.after is not None
    assert (receipt.before.held_bytes, receipt.before.driver_used_bytes) == (4 * GIB, 5 * GIB)
    assert (receipt.after.held_bytes, receipt.after.driver_used_bytes) == (GIB, 2 * GIB)
    assert (receipt.pid, receipt.allocator, receipt.requested_by) == (10, "torch", "test")
    assert answer.released_bytes == 3 * GIB


def test_a_driver_that_takes_its_time_is_waited_for():
    (receipt,) = Scene(train(), lag=4).run().receipts
    assert (receipt.outcome, receipt.driver_released_bytes) == ("freed", 3 * GIB)


def test_what_the_driver_never_sees_come_back_is_freed_in_part():
    (receipt,) = Scene(train(), lag=10**6).run().receipts
    assert (receipt.outcome, receipt.released_bytes, receipt.driver_released_bytes) == ("partial", 3 * GIB, 0)
    assert "driver saw 0" in receipt.reason


def test_what_the_program_took_just_around_the_flush_is_a_race_and_not_a_part():
    def takes_more(scene: Scene, identity: Identity, request: FlushCommand) -> FlushResult:
        result = give_all(scene, identity, request)
        scene.driver_counts[10, "GPU-a"] += GIB
        scene.programs = [make_report(10, pools=(make_pool(live=2 * GIB, device_allocations=1),))]
        return result

    (receipt,) = Scene(train(), behave=takes_more).run().receipts
    assert (receipt.outcome, receipt.raced) == ("freed", True)
    assert (receipt.released_bytes, receipt.driver_released_bytes) == (3 * GIB, 2 * GIB)


def test_a_plan_changes_nothing():
    scene = Scene(train())
    (receipt,) = scene.run(dry_run=True).receipts
    assert (receipt.outcome, receipt.released_bytes, receipt.after) == ("planned", 0, None)
    assert receipt.expected == Expected(3 * GIB, 3 * GIB, 3 * GIB)
    assert scene.driver_counts == {(10, "GPU-a"): 5 * GIB}


def test_an_agent_that_does_not_answer_is_a_timeout():
    (receipt,) = Scene(train(), behave=lambda *_: None).run().receipts
    assert receipt.outcome == "timeout"


def test_a_refusal_is_handed_on_with_its_reason():
    def refuse(scene: Scene, identity: Identity, request: FlushCommand) -> FlushResult:
        return FlushResult(request.id, "refused", "a CUDA graph is being captured")

    (receipt,) = Scene(train(), behave=refuse).run().receipts
    assert (receipt.outcome, receipt.reason) == ("refused", "a CUDA graph is being captured")


def test_who_would_return_less_than_asked_is_left_alone():
    scene = Scene(train(10, cached=GIB), train(11, cached=3 * GIB))
    answer = scene.run(min_reclaimable_bytes=2 * GIB)
    assert scene.flushed == [11]
    assert {receipt.pid: receipt.outcome for receipt in answer.receipts} == {10: "nothing", 11: "freed"}


def test_every_allocator_of_a_process_gets_its_own_receipt():
    pools = (make_pool(cached=GIB), make_pool(allocator="cupy", cached=2 * GIB))
    scene = Scene(make_report(pools=pools))
    scene.driver_counts = {(10, "GPU-a"): 4 * GIB}
    answer = scene.run()
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
def test_what_must_not_stall_together_takes_turns(reports: Sequence[AgentReport], at_once: int):
    async def most_at_once() -> int:
        scene = Scene(*reports)
        scene.gate = asyncio.Event()
        flush = asyncio.create_task(scene.flusher().flush(FlushRequest(target=Target(all=True)), "test"))
        for _ in range(50):
            await asyncio.sleep(0)
        scene.gate.set()
        await flush
        return scene.most_running

    assert asyncio.run(most_at_once()) == at_once


def test_a_rank_that_may_be_in_a_flush_still_keeps_the_others_waiting_until_it_has_answered():
    first, second = train(10, program=RANK), train(11, device="GPU-b", program=RANK)
    scene = Scene(
        first, second, behave=lambda scene, who, order: None if who.pid == 10 else give_all(scene, who, order)
    )
    scene.unanswered = {Identity(10, 100, 1000)}

    async def run() -> list[Outcome]:
        flusher = scene.flusher()
        together = await flusher.flush(FlushRequest(target=Target(all=True)), "test")
        later = await flusher.flush(FlushRequest(target=Target(pid=11)), "test")
        scene.unanswered.clear()
        last = await flusher.flush(FlushRequest(target=Target(pid=11)), "test")
        return [receipt.outcome for answer in (together, later, last) for receipt in answer.receipts]

    assert asyncio.run(run()) == ["timeout", "refused", "refused", "freed"]


def test_a_receipt_says_when_the_program_took_its_memory_back_at_once():
    def thrash(scene: Scene, identity: Identity, order: FlushCommand) -> FlushResult:
        result = give_all(scene, identity, order)
        scene.programs = [train(cached=3 * GIB, thrashes=1)]
        return result

    (receipt,) = Scene(train(), behave=thrash).run().receipts
    assert (receipt.outcome, receipt.released_bytes) == ("freed", 3 * GIB)
    assert "thrash" in receipt.reason


def test_a_process_is_flushed_once_at_a_time_and_then_rests():
    async def run() -> None:
        scene = Scene(train())
        scene.gate = asyncio.Event()
        flusher = scene.flusher()
        request = FlushRequest(target=Target(pid=10))
        first = asyncio.create_task(flusher.flush(request, "test"))
        for _ in range(10):
            await asyncio.sleep(0)
        with pytest.raises(AlreadyUnderWay):
            await flusher.flush(request, "test")
        scene.gate.set()
        await first
        with pytest.raises(CoolingDown) as refused:
            await flusher.flush(request, "test")
        assert 0 < refused.value.retry_after_seconds <= 30
        planned = await flusher.flush(FlushRequest(target=Target(pid=10), dry_run=True), "test")
        assert planned.receipts[0].outcome == "planned"

    asyncio.run(run())


def test_those_that_rest_are_refused_and_the_others_flushed():
    async def run() -> None:
        scene = Scene(train(10), train(11))
        flusher = scene.flusher()
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
def test_a_target_names_processes(target: Target, pids: list[int] | None):
    serve = make_report(11, pools=(make_pool("GPU-b", cached=GIB),), workload="serve")
    scene = Scene(train(10), serve)
    if pids is None:
        with pytest.raises(NoSuchTarget, match=str(target)):
            scene.run(target=target)
    else:
        scene.run(target=target)
        assert sorted(scene.flushed) == pids


def test_a_process_whose_agent_sees_no_pool_has_nothing_to_give():
    (receipt,) = Scene(make_report()).run().receipts
    assert receipt.outcome == "nothing"


def test_a_receipt_shows_what_the_plan_promised():
    async def run() -> None:
        scene = Scene(train())
        flusher = scene.flusher()
        plan = await flusher.flush(FlushRequest(target=Target(pid=10), dry_run=True), "test")
        scene.programs = [train(cached=2 * GIB)]
        carried_out = FlushRequest(target=Target(pid=10), plan=plan.id)
        receipts = (await flusher.flush(carried_out, "test")).receipts
        (receipt,) = receipts
        assert receipt.planned == Expected(3 * GIB, 3 * GIB, 3 * GIB)
        assert (receipt.expected, receipt.released_bytes) == (Expected(2 * GIB, 2 * GIB, 2 * GIB), 2 * GIB)
        scene.refill()
        (other,) = (await flusher.flush(replace(carried_out, force=True), "somebody else")).receipts
        assert other.planned is None

    asyncio.run(run())


@pytest.mark.parametrize(
    ("before", "after", "driver", "says"),
    [
        (2 * GIB, 62 * GIB, 70 * GIB, "the pool holds 60.0 GiB more than before"),
        (60 * GIB, GIB, 5 * GIB, "59.0 GiB released, the driver had counted 5.0 GiB"),
        (600 * GIB, GIB, None, "599.0 GiB released, the device has 80.0 GiB"),
    ],
)
def test_a_release_that_cannot_be_counts_as_nothing(before: int, after: int, driver: int | None, says: str):
    def lie(scene: Scene, identity: Identity, request: FlushCommand) -> FlushResult:
        change = PoolChange(make_pool(live=before), make_pool(live=after), Expected(0, 0, 0))
        return FlushResult(request.id, "freed", "", (change,), ())

    scene = Scene(train(), train(11), behave=lie)
    scene.driver_counts = {(11, "GPU-a"): GIB} | ({} if driver is None else {(10, "GPU-a"): driver})
    answer = scene.run(target=Target(pid=10))
    (receipt,) = answer.receipts
    assert (receipt.outcome, receipt.released_bytes, answer.released_bytes) == ("nothing", 0, 0)
    assert says in receipt.reason


def test_receipts_are_of_reported_pools_once_each_and_of_steps_that_were_asked_for():
    def many(scene: Scene, identity: Identity, request: FlushCommand) -> FlushResult:
        (own,) = give_all(scene, identity, request).pools
        foreign = [replace(own, before=make_pool(f"GPU-{n}"), after=make_pool(f"GPU-{n}")) for n in range(50)]
        other = replace(own, before=replace(own.before, allocator="cupy"))
        steps = tuple(StepResult(step, 0, 0.1) for step in ("cache", "gc", "cache", "bogus"))
        return FlushResult(request.id, "freed", "", (*foreign, other, own, own), steps)

    (receipt,) = Scene(train(), behave=many).run().receipts
    assert (receipt.device_uuid, receipt.released_bytes) == ("GPU-a", 3 * GIB)
    assert [step.step for step in receipt.steps] == ["cache"]


def test_an_agent_that_did_not_answer_for_one_allocator_is_not_asked_for_the_others():
    pools = tuple(make_pool(allocator=f"a{n}", cached=GIB) for n in range(5))
    scene = Scene(make_report(pools=pools), behave=lambda *_: None)
    scene.driver_counts = {}
    assert [receipt.outcome for receipt in scene.run().receipts] == ["timeout"]
    assert len(scene.flushed) == 1


def test_reasons_are_in_sizes_for_people():
    (receipt,) = Scene(train(cached=GIB)).run(min_reclaimable_bytes=100 * GIB).receipts
    assert receipt.reason == "1.0 GiB is reclaimable, less than the 100.0 GiB asked for"
