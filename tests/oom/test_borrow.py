"""Room for a failed allocation: whose caches are flushed for it, and how long a program waits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

import pytest

from gpumond.facts.engines import EngineProcess, EngineReading
from gpumond.facts.flush import FlushRequest, FlushResponse, empty_receipt
from gpumond.facts.messages import BorrowRequest, BorrowResponse
from gpumond.facts.program import ProcessKey
from gpumond.facts.quota import EffectiveQuota, ReclaimPolicy
from gpumond.facts.snapshot import ProcessQuota, Reading, Snapshot
from gpumond.facts.units import GIB
from gpumond.features.quotas.admissions import Admissions, DeviceCapacity, Neighbor
from gpumond.features.quotas.borrow import (
    RESPONSE_TIMEOUT_SECONDS,
    Borrows,
    EarlierFlush,
    borrow_plan,
    idle_engines,
    is_cooling_down,
)
from gpumond.host.peer import PeerIdentity
from tests.helpers.memory_store import MemoryStore
from tests.helpers.values import make_device, make_pool, make_process, make_report, make_snapshot
from tests.helpers.virtual_time import run

OWN, OTHER = 1000, 1001
BORROWER = PeerIdentity(10, 100, OWN)


def neighbor(pid: int, uid: int, size: int = 10 * GIB, refilled_flushes: int = 0) -> Neighbor:
    return Neighbor(
        process=ProcessKey(pid, 100),
        uid=uid,
        workload="notebook",
        reclaimable_bytes=size,
        refilled_flushes=refilled_flushes,
    )


def flushed_pids(reclaim: ReclaimPolicy, size: int, *neighbors: Neighbor) -> list[int]:
    room = DeviceCapacity(uuid="GPU-a", size_bytes=80 * GIB, free_bytes=GIB, neighbors=neighbors)
    found = borrow_plan(room, GIB, BORROWER, size, reclaim)
    return [] if found.missing_bytes else [each.process.pid for each in found.flushes]


@pytest.mark.parametrize(
    ("reclaim", "size", "pids"),
    [
        ("user", GIB // 2, []),
        ("user", 5 * GIB, [20]),
        ("user", 15 * GIB, []),
        ("off", 15 * GIB, []),
        ("all", 5 * GIB, [20]),
        ("all", 15 * GIB, [21]),
        ("all", 45 * GIB, []),
    ],
)
def test_own_programs_come_first_and_others_only_with_permission(reclaim: ReclaimPolicy, size: int, pids: list[int]):
    assert flushed_pids(reclaim, size, neighbor(21, OTHER, 30 * GIB), neighbor(20, OWN)) == pids


def test_a_borrower_is_not_flushed_for_itself():
    assert flushed_pids("all", 5 * GIB, neighbor(BORROWER.pid, OWN)) == []


def test_a_program_that_allocated_flushed_memory_again_rests_for_ten_minutes():
    flushed = {ProcessKey(20, 100): EarlierFlush(100.0, 3)}
    assert is_cooling_down(neighbor(20, OWN, refilled_flushes=3), flushed, 105.0)
    assert not is_cooling_down(neighbor(20, OWN, refilled_flushes=3), flushed, 107.0)
    assert is_cooling_down(neighbor(20, OWN, refilled_flushes=4), flushed, 699.0)
    assert not is_cooling_down(neighbor(20, OWN, refilled_flushes=4), flushed, 701.0)


@pytest.mark.parametrize(
    ("reclaim", "uid", "idle", "names"),
    [
        ("user", OWN, 900.0, ["chat"]),
        ("user", OTHER, 900.0, []),
        ("all", OTHER, 900.0, ["chat"]),
        ("all", OWN, 9.0, []),
    ],
)
def test_an_idle_engine_is_released_under_the_same_rules(
    reclaim: ReclaimPolicy, uid: int, idle: float, names: list[str]
):
    engine = EngineReading(
        name="chat",
        kind="vllm",
        up=True,
        idle_seconds=idle,
        processes=(EngineProcess(30, 100),),
        uid=uid,
        methods=("sleep",),
    )
    device = make_device(processes=(make_process(30, 40 * GIB),))
    assert idle_engines(make_snapshot(device, engines=(engine,)), "GPU-a", BORROWER, reclaim, 20 * GIB) == names


@dataclass
class Tenant:
    pid: int
    uid: int
    live: int
    cached: int
    reserve: int | None = None
    policy: str = "allow"


@dataclass
class Machine:
    """A device with the programs of three users, whose flushes take up to ten seconds."""

    random: Random
    reclaim: ReclaimPolicy
    tenants: list[Tenant]
    time: float = 0.0
    flushes: list[tuple[int, Tenant]] = field(default_factory=list)
    """The borrower's uid, and the program as it was before its flush."""
    borrower: int = 0

    def snapshot(self) -> Snapshot:
        used = sum(each.live + each.cached for each in self.tenants)
        device = make_device(
            used_bytes=used,
            free_bytes=80 * GIB - used,
            processes=tuple(make_process(each.pid, each.live + each.cached, uid=each.uid) for each in self.tenants),
        )
        reports = tuple(
            make_report(
                each.pid, (make_pool(live=each.live, cached=each.cached),), uid=each.uid, flush_policy=each.policy
            )
            for each in self.tenants
        )
        quotas = tuple(
            ProcessQuota(
                pid=each.pid,
                start_ticks=100,
                quota=EffectiveQuota(reserve_bytes=each.reserve, reserve_quota=f"of-{each.pid}"),
            )
            for each in self.tenants
            if each.reserve is not None
        )
        return make_snapshot(device, reports=reports, quotas=quotas)

    async def read(self) -> Reading:
        await asyncio.sleep(self.random.choice((0.0, 0.1, 3.0)))
        return Reading(devices=self.snapshot().devices)

    async def flush(self, request: FlushRequest, requested_by: str) -> FlushResponse:
        tenant = next(each for each in self.tenants if each.pid == request.target.pid)
        self.flushes.append((self.borrower, replace(tenant)))
        await asyncio.sleep(self.random.uniform(0.0, 10.0))
        released, tenant.cached = tenant.cached, 0
        report = make_report(tenant.pid, uid=tenant.uid)
        receipt = replace(empty_receipt(report, "freed", "", requested_by, 0.0), released_bytes=released)
        return FlushResponse("", (receipt,), released)

    def borrows(self) -> Borrows:
        admissions = Admissions(self.flush, lambda: self.reclaim, lambda pid: None, lambda: self.time, MemoryStore())
        return Borrows(
            self.flush, self.snapshot, admissions.capacity_for, self.read, lambda: self.reclaim, lambda: self.time
        )


def machine(random: Random) -> Machine:
    left, tenants = 80 * GIB, []
    for pid in range(10, 10 + random.randint(2, 6)):
        live, cached = (random.randint(0, min(left // 2, 20 * GIB)) for _ in range(2))
        left -= live + cached
        reserve = random.choice((None, None, random.randint(GIB, 30 * GIB)))
        policy = random.choice(("allow", "allow", "allow", "never"))
        tenants.append(Tenant(pid, random.choice((1000, 1001, 1002)), live, cached, reserve, policy))
    return Machine(random, random.choice(("user", "all", "off")), tenants)


async def history(own: Machine) -> list[tuple[float, BorrowResponse]]:
    """Let programs borrow, allocate and cache at random, and return how long each request waited, and its answer."""
    borrows, random, loop = own.borrows(), own.random, asyncio.get_running_loop()
    waits = []
    for number in range(6):
        tenant = random.choice(own.tenants)
        own.borrower = tenant.uid
        began = loop.time()
        identity = PeerIdentity(tenant.pid, 100, tenant.uid)
        answer = await borrows.borrow(identity, BorrowRequest(str(number), random.randint(1, 40 * GIB), "GPU-a"))
        waits.append((loop.time() - began, answer))
        own.time += random.choice((0.5, 10.0, 700.0))
        await asyncio.sleep(random.choice((0.0, 12.0)))
        free = 80 * GIB - sum(each.live + each.cached for each in own.tenants)
        random.choice(own.tenants).cached += random.randint(0, max(0, free))
    await borrows.close()
    return waits


def violations(own: Machine, waits: Sequence[tuple[float, BorrowResponse]]) -> list[str]:
    found = [f"waited {seconds}" for seconds, _ in waits if seconds > 2.0]
    for borrower, tenant in own.flushes:
        if tenant.live + tenant.cached <= (tenant.reserve or 0):
            found.append(f"{tenant} was within its reserve")
        if tenant.uid != borrower and own.reclaim != "all":
            found.append(f"{tenant} is of another user than {borrower}")
        if tenant.policy == "never" or own.reclaim == "off":
            found.append(f"{tenant} may not be flushed")
    return found


@pytest.mark.parametrize("count", [250, pytest.param(1000, marks=pytest.mark.soak)])
def test_no_history_flushes_a_reserve_or_another_user_or_keeps_a_program_waiting(count: int):
    flushes = rescued = 0
    for seed in range(count):
        own = machine(Random(seed))
        waits, _ = run(history(own))
        assert violations(own, waits) == [], seed
        flushes += len(own.flushes)
        rescued += sum(answer.fits and answer.released_bytes > 0 for _, answer in waits)
    assert flushes > count // 2
    assert rescued > count // 10


def test_a_request_is_answered_while_a_driver_does_not_answer():
    own = Machine(Random(1), "user", [Tenant(10, OWN, 40 * GIB, 0), Tenant(20, OWN, GIB, 30 * GIB)])
    own.random.choice = lambda options: options[-1]  # type: ignore[method-assign]

    async def request() -> BorrowResponse:
        borrows = own.borrows()
        try:
            return await borrows.borrow(BORROWER, BorrowRequest("1", 20 * GIB, "GPU-a"))
        finally:
            await borrows.close()

    answer, seconds = run(request())
    assert seconds <= RESPONSE_TIMEOUT_SECONDS
    assert answer.fits or answer.reason == "a flush is still in progress"
