"""Requests for memory on a simulated device: never more than it has, and each is granted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import pytest

from gpumond.facts.program import ProcessKey
from gpumond.facts.quota import StoredAdmission
from gpumond.features.quotas.admissions import AdmissionQueue, Decision, DeviceCapacity, Neighbor, decide, reclaim_plan

SCHEDULES = 2_000
PROGRAMS = 8
SIZE = 64
DEADLINE = 8
"""In steps of a schedule. Programs allocate within this time."""


def request(name: str, need: int, uid: int | None = None) -> StoredAdmission:
    return StoredAdmission(
        id=name,
        owner="",
        device_uuid="GPU-a",
        device_index=0,
        need_bytes=need,
        grant_seconds=DEADLINE,
        uid=uid,
        pid=None,
        start_ticks=None,
        program_uid=None,
        deadline=None,
    )


def room(free: int | None, *neighbors: Neighbor, reserved: int = 0) -> DeviceCapacity:
    return DeviceCapacity(
        uuid="GPU-a", size_bytes=SIZE, free_bytes=free, unused_reserve_bytes=reserved, neighbors=neighbors
    )


def neighbor(pid: int, reclaimable: int, idle: float = 0.0, uid: int = 1, refilled_flushes: int = 0) -> Neighbor:
    return Neighbor(
        process=ProcessKey(pid, 1),
        uid=uid,
        workload=f"program-{pid}",
        reclaimable_bytes=reclaimable,
        idle_seconds=idle,
        refilled_flushes=refilled_flushes,
    )


def decided(queue: AdmissionQueue, room: DeviceCapacity, now: float = 0.0, **allocated: int) -> Decision:
    return decide(queue, [room], allocated, (), now)


@dataclass(slots=True)
class Program:
    """A program of the model: it arrives, is granted, allocates in parts, keeps a part as cache, and ends."""

    need: int
    arrives_at: int
    state: str = "new"
    live: int = 0
    cached: int = 0
    allocates_by: int = 0
    ends_at: int = 0


class Schedule:
    """One random schedule of programs on a device without an allocator that waits: it fails above its size."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        draw = self.random.randint
        self.programs = {str(n): Program(draw(1, SIZE), draw(0, 6)) for n in range(PROGRAMS)}
        self.queue, self.now, self.free = AdmissionQueue(), 0, SIZE
        self.order: list[str] = []
        self.granted: list[str] = []

    def run(self) -> None:
        remaining = set(self.programs)
        while remaining:
            assert self.now < 3 * DEADLINE * PROGRAMS, "a program starves"
            for name in sorted(remaining):
                self._move(name, self.programs[name])
                if self.programs[name].state == "ended":
                    remaining.discard(name)
            if self.queue.waiting or self.queue.grants:
                self._decide()
            self.now += 1

    def _move(self, name: str, program: Program) -> None:
        if program.state == "new" and self.now >= program.arrives_at:
            program.state = "waiting"
            self.order.append(name)
            self.queue = AdmissionQueue((*self.queue.waiting, request(name, program.need)), self.queue.grants)
        elif program.state == "granted":
            rest = program.need - program.live
            part = rest if self.now >= program.allocates_by else int(rest * self.random.random())
            self.free -= part
            assert self.free >= 0, "more is allocated than the device has"
            program.live += part
            if part == rest:
                program.state, program.ends_at = "running", self.now + 1 + int(4 * self.random.random())
        elif program.state == "running":
            if self.now >= program.ends_at:
                self.free += program.live + program.cached
                program.state, program.live, program.cached = "ended", 0, 0
            elif self.random.random() < 0.3:
                part = int(program.live * self.random.random())
                program.live, program.cached = program.live - part, program.cached + part

    def _decide(self) -> None:
        allocated = {grant.id: self.programs[grant.id].live for grant in self.queue.grants}
        neighbors = [neighbor(int(name), p.cached) for name, p in self.programs.items() if p.cached]
        decision = decide(self.queue, [room(self.free, *neighbors)], allocated, (), self.now)
        self.queue = decision.queue
        for each in decision.granted:
            program = self.programs[each.id]
            program.state, program.allocates_by = "granted", self.now + 1 + int((DEADLINE - 2) * self.random.random())
            self.granted.append(each.id)
        for plan in decision.plans.values():
            for flushed in plan.flushes if self.random.random() < 0.5 else ():
                self.free += self.programs[str(flushed.process.pid)].cached
                self.programs[str(flushed.process.pid)].cached = 0


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, *(pytest.param(n * SCHEDULES, marks=pytest.mark.soak) for n in range(1, 5))])
def test_eight_programs_never_overcommit_the_device_and_never_starve(first: int):
    for seed in range(first, first + SCHEDULES):
        schedule = Schedule(seed)
        schedule.run()
        assert schedule.granted == schedule.order, seed


def test_requests_are_granted_in_order_and_a_small_one_does_not_overtake():
    queue = AdmissionQueue((request("first", 30), request("large", 40), request("small", 1)))
    decision = decided(queue, room(64))
    assert [each.id for each in decision.granted] == ["first"]
    assert [each.id for each in decision.queue.waiting] == ["large", "small"]
    assert list(decision.plans) == ["large"]
    assert (decision.plans["large"].available_bytes, decision.plans["large"].missing_bytes) == (34, 6)


def test_granted_memory_counts_until_it_is_allocated_or_its_deadline_passes():
    queue = decided(AdmissionQueue((request("first", 40),)), room(64)).queue
    queue = replace(queue, waiting=(request("second", 30),))
    assert not decided(queue, room(64)).granted
    assert not decided(queue, room(44), first=20).granted
    assert not decided(queue, room(64), now=DEADLINE - 1).granted
    assert decided(queue, room(64), now=DEADLINE).granted
    assert decided(queue, room(34), first=30).granted == ()
    assert not decided(queue, room(24), first=40).queue.grants
    assert decide(queue, [room(64)], {}, {"first"}, 0.0).granted


def test_reserves_are_not_granted_and_are_restored_by_flushes():
    decision = decided(AdmissionQueue((request("one", 10),)), room(30, neighbor(1, 20), reserved=25))
    assert not decision.granted
    assert decision.plans["one"].available_bytes == 5
    assert "GPU-a" not in decision.plans
    short = decided(AdmissionQueue(), room(30, neighbor(1, 8), neighbor(2, 20), reserved=45))
    assert [each.process.pid for each in short.plans["GPU-a"].flushes] == [2]


def test_unknown_free_memory_grants_nothing():
    decision = decided(AdmissionQueue((request("one", 1),)), room(None, neighbor(1, 20)))
    assert not decision.granted
    assert decision.plans["one"].available_bytes is None
    assert not decision.plans["one"].fits


@pytest.mark.parametrize(
    ("short", "pids", "missing"),
    [
        (5, [2], 0),  # idle
        (16, [2, 1], 0),
        (25, [2, 1, 3], 0),
        (38, [2, 1, 3, 4], 0),  # 4 allocates flushed memory again
        (50, [2, 1, 3, 4], 9),
    ],
)
def test_cheapest_caches_are_flushed_until_the_request_fits(short: int, pids: list[int], missing: int):
    neighbors = [neighbor(1, 12), neighbor(2, 6, idle=60.0), neighbor(3, 8), neighbor(4, 15, refilled_flushes=1)]
    plan = reclaim_plan(neighbors, short, 0)
    assert ([each.process.pid for each in plan.flushes], plan.missing_bytes) == (pids, missing)


def test_flushes_that_a_larger_one_makes_superfluous_are_left_out():
    plan = reclaim_plan([neighbor(1, 2, idle=60.0), neighbor(2, 30)], 10, 0)
    assert [each.process.pid for each in plan.flushes] == [2]


def test_programs_of_other_users_are_flushed_only_if_allowed():
    neighbors = (neighbor(1, 20, uid=1), neighbor(2, 20, uid=2))
    for uid, pids in ((1, [1]), (None, [1, 2]), (3, [])):
        decision = decided(AdmissionQueue((request("one", 40, uid),)), room(20, *neighbors))
        plan = decision.plans["one"]
        assert {each.process.pid for each in plan.flushes} <= set(pids)
        assert plan.missing_bytes == max(0, 20 - 20 * len(pids))


def test_devices_have_separate_queues():
    other = replace(request("other", 10), device_uuid="GPU-b")
    capacities = [room(0), DeviceCapacity(uuid="GPU-b", size_bytes=SIZE, free_bytes=64)]
    decision = decide(AdmissionQueue((request("one", 10), other)), capacities, {}, (), 0.0)
    assert [each.id for each in decision.granted] == ["other"]
    assert decision.queue.grants == (replace(other, deadline=DEADLINE),)


def of_user(user: str, name: str, need: int) -> StoredAdmission:
    return replace(request(name, need), owner=user)


def granted_ids(decision: Decision) -> list[str]:
    return [each.id for each in decision.granted]


def test_users_take_turns():
    waiting = [of_user("a", "a1", 10), of_user("a", "a2", 10), of_user("b", "b1", 10), of_user("a", "a3", 10)]
    decision = decided(AdmissionQueue(tuple(waiting)), room(64))
    assert granted_ids(decision) == ["a1", "b1", "a2", "a3"]
    after = replace(decision.queue, waiting=(of_user("a", "a4", 10), of_user("b", "b2", 10)))
    assert granted_ids(decided(after, room(64)))[0] == "b2", "grants count as turns"


def test_request_that_needs_the_end_of_a_program_keeps_back_its_own_user_only():
    waiting = (of_user("a", "large", 60), of_user("a", "small", 1), of_user("b", "other", 1))
    decision = decided(AdmissionQueue(waiting), room(24))
    assert granted_ids(decision) == ["other"]
    assert [each.id for each in decision.queue.waiting] == ["large", "small"]
    assert granted_ids(decided(decision.queue, room(64), now=DEADLINE)) == ["large", "small"]


def test_request_that_flushes_can_satisfy_keeps_others_back_for_a_limited_time():
    queue = AdmissionQueue((of_user("a", "first", 30), of_user("b", "other", 1)))
    cached = room(24, neighbor(1, 20))
    held = decided(queue, cached)
    assert (granted_ids(held), held.blocking) == ([], ("first",))
    passed = decide(queue, [cached], {}, (), 0.0, {"first"})
    assert (granted_ids(passed), passed.blocking) == (["other"], ("first",))


def test_request_that_grants_of_others_keep_from_memory_holds_its_place():
    grants = decided(AdmissionQueue((of_user("a", "one", 60),)), room(64)).queue.grants
    queue = AdmissionQueue((of_user("b", "large", 40), of_user("c", "small", 1)), grants)
    decision = decided(queue, room(64))
    assert (granted_ids(decision), decision.blocking) == ([], ("large",))


def test_grants_of_one_user_count_for_others_up_to_a_share_of_the_device_or_the_largest():
    many = decided(AdmissionQueue(tuple(of_user("a", f"a{n}", 8) for n in range(8))), room(64)).queue
    assert len(many.grants) == 8
    assert granted_ids(decided(replace(many, waiting=(of_user("b", "b", 32),)), room(64))) == ["b"]
    assert granted_ids(decided(replace(many, waiting=(of_user("b", "b", 33),)), room(64))) == []
    assert granted_ids(decided(replace(many, waiting=(of_user("a", "a", 1),)), room(64))) == []
    one = decided(AdmissionQueue((of_user("a", "a", 60),)), room(64)).queue
    assert granted_ids(decided(replace(one, waiting=(of_user("b", "b", 5),)), room(64))) == []
