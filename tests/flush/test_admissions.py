"""Requests for memory: places, limits, and the flushes that make room."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from gpumond.facts.errors import CooldownActive, NoSuchEntry, TooManyAdmissions
from gpumond.facts.flush import FlushRequest, FlushResponse
from gpumond.facts.program import ProcessKey
from gpumond.facts.quota import ReclaimPolicy
from gpumond.facts.snapshot import Snapshot
from gpumond.facts.units import GIB
from gpumond.features.quotas.admissions import (
    FLUSH_PAUSE_SECONDS,
    GRANT_SECONDS,
    LEASE_SECONDS,
    MAX_BLOCKING_SECONDS,
    MAX_REQUESTS,
    MAX_REQUESTS_PER_USER,
    PROCESS_GRANT_SECONDS,
    Admission,
    Admissions,
)
from gpumond.serve.examples import DEVICE, REPORT, SNAPSHOT
from tests.helpers.agent_server import in_event_loop
from tests.helpers.memory_store import MemoryStore

RESEARCH = 1000


def with_free(gib: int) -> Snapshot:
    """The user's program holds 40 GiB of cache."""
    return replace(SNAPSHOT, devices=(replace(DEVICE, free_bytes=gib * GIB),), reports=(REPORT,))


class World:
    """Requests with a clock, a store, and flushes that only count."""

    def __init__(self, reclaim: ReclaimPolicy = "user", store: MemoryStore | None = None, now: float = 0.0) -> None:
        self.now, self.reclaim, self.alive, self.refuses = now, reclaim, True, False
        self.flushed: list[tuple[int | None, str]] = []
        self.waiting: list[str] = []
        self.store = store or MemoryStore()
        self.admissions = Admissions(self.flush, lambda: self.reclaim, self.find, lambda: self.now, self.store)

    async def restarted(self) -> World:
        """Return the requests of the next daemon, restored from the store."""
        world = World(self.reclaim, self.store, self.now)
        await world.admissions.load()
        return world

    async def flush(self, request: FlushRequest, requested_by: str) -> FlushResponse:
        self.flushed.append((request.target.pid, requested_by))
        self.waiting.append(request.requested_for)
        assert request.by_rule
        if self.refuses:
            raise CooldownActive("soon", 10.0)
        return FlushResponse("id", (), 0)

    def find(self, pid: int) -> tuple[ProcessKey, int] | None:
        return (ProcessKey(pid, 1), RESEARCH) if self.alive else None

    def ask(
        self, gib: int, free: int = 10, wait: bool = True, owner: str = "uid:1000", pid: int | None = None
    ) -> Admission:
        uid = int(owner[4:]) if owner.startswith("uid:") else None
        snapshot = with_free(free)
        return self.admissions.request(snapshot, snapshot.devices[0], gib * GIB, owner, uid=uid, pid=pid, wait=wait)

    def state(self, asked: Admission, free: int = 10, owner: str = "uid:1000") -> str:
        return self.admissions.renew(with_free(free), asked.id, owner).state

    async def tick(self, free: int) -> None:
        self.admissions.execute(with_free(free))
        for _ in range(4):
            await asyncio.sleep(0)


@pytest.fixture
def world() -> World:
    return World()


def test_request_that_fits_is_granted_and_counts_until_its_deadline(world: World):
    assert world.ask(8, wait=False).state == "granted"
    refused = world.ask(8, wait=False)
    assert (refused.state, refused.available_bytes, refused.missing_bytes) == ("refused", 2 * GIB, 0)
    assert [(each.workload, each.reclaimable_bytes) for each in refused.plan] == [("train", 40 * GIB)]
    world.now = GRANT_SECONDS
    assert world.ask(8, wait=False).state == "granted"


def test_end_of_the_process_ends_its_grant(world: World):
    assert world.ask(8, pid=1).state == "granted"
    world.now = PROCESS_GRANT_SECONDS - 1
    assert world.ask(8, wait=False).state == "refused"
    world.alive = False
    assert world.ask(8, wait=False).state == "granted"


def test_process_of_another_user_is_ignored(world: World):
    assert world.ask(8, owner="uid:1001", pid=1).state == "granted"
    world.alive = False
    assert world.ask(8, owner="uid:1001", wait=False).state == "refused"
    world.now = GRANT_SECONDS
    assert world.ask(8, wait=False).state == "granted"


def test_queue_states_the_user_of_the_program_and_not_the_caller(world: World):
    def users() -> list[str | None]:
        return [each.user for each in world.admissions.queue(with_free(10))]

    world.ask(20, owner="token", pid=1)
    assert users() == [str(RESEARCH)]
    world.ask(20, owner="token")
    assert users() == [str(RESEARCH), None]
    (process, *_) = DEVICE.processes or ()
    named = replace(DEVICE, processes=(replace(process, uid=RESEARCH, user="ann"),))
    assert world.admissions.queue(replace(SNAPSHOT, devices=(named,)))[0].user == "ann"


def test_refused_request_keeps_no_place(world: World):
    assert world.ask(90, wait=False).missing_bytes == 40 * GIB
    assert world.ask(8, wait=False).state == "granted"


@in_event_loop
async def test_waiting_request_is_granted_in_order_when_memory_is_free():
    world = World(reclaim="off")
    first, second = world.ask(20), world.ask(5)
    assert [(each.state, each.ahead) for each in (first, second)] == [("waiting", 0), ("waiting", 1)]
    assert (first.missing_bytes, second.missing_bytes) == (10 * GIB, 15 * GIB)
    await world.tick(20)
    assert (world.state(first), world.state(second)) == ("granted", "waiting")
    await world.tick(26)
    assert world.state(second) == "granted"


@in_event_loop
async def test_request_that_is_not_renewed_loses_its_place():
    world = World(reclaim="off")
    first, second = world.ask(20), world.ask(5)
    world.now = LEASE_SECONDS
    assert world.state(second) == "waiting"
    world.now = LEASE_SECONDS + 1
    await world.tick(10)
    assert world.state(second) == "granted"
    with pytest.raises(NoSuchEntry, match="wasn't renewed in 10 s"):
        world.state(first)


def test_request_of_another_user_is_unknown(world: World):
    asked = world.ask(20)
    with pytest.raises(NoSuchEntry):
        world.state(asked, owner="uid:1001")
    with pytest.raises(NoSuchEntry):
        world.admissions.cancel(asked.id, "uid:1001")
    world.admissions.cancel(asked.id, "uid:1000")
    assert world.ask(8).state == "granted"


def test_withdrawn_grant_is_released(world: World):
    world.admissions.cancel(world.ask(8).id, "uid:1000")
    assert world.ask(8).state == "granted"


def test_requests_are_limited_for_each_user_and_in_total(world: World):
    for _ in range(MAX_REQUESTS_PER_USER):
        world.ask(20)
    with pytest.raises(TooManyAdmissions, match="16 per user"):
        world.ask(20)
    for number in range(MAX_REQUESTS - MAX_REQUESTS_PER_USER):
        world.ask(20, owner=f"uid:{number // MAX_REQUESTS_PER_USER}")
    with pytest.raises(TooManyAdmissions, match="256 in total"):
        world.ask(20, owner="uid:5000")


@in_event_loop
async def test_programs_are_flushed_for_the_first_request_with_longer_and_longer_pauses():
    world = World()
    asked = world.ask(30)
    await world.tick(10)
    assert world.flushed == [(REPORT.pid, "uid:1000")]
    times = [0.0]
    for second in range(1, 90):
        world.now = float(second)
        assert world.state(asked) == "waiting"
        await world.tick(10)
        if len(world.flushed) > len(times):
            times.append(world.now)
    assert times == [factor * FLUSH_PAUSE_SECONDS for factor in (0, 1, 3, 7, 15)]


@in_event_loop
async def test_nothing_is_flushed_if_the_request_does_not_fit_even_then():
    world = World()
    asked = world.ask(60)
    await world.tick(10)
    assert (world.flushed, asked.missing_bytes) == ([], 10 * GIB)
    assert world.state(asked) == "waiting"


@in_event_loop
async def test_programs_of_other_users_are_flushed_only_if_lending_is_all():
    for reclaim, owner, flushed in (
        ("user", "uid:1001", 0),
        ("all", "uid:1001", 1),
        ("off", "uid:1000", 0),
        ("user", "token", 1),
    ):
        world = World(reclaim=reclaim)  # type: ignore[arg-type]
        uid = int(owner[4:]) if owner.startswith("uid:") else None
        world.admissions.request(with_free(10), with_free(10).devices[0], 30 * GIB, owner, uid=uid, wait=True)
        await world.tick(10)
        assert len(world.flushed) == flushed, (reclaim, owner)


@in_event_loop
async def test_refused_flush_leaves_the_request_waiting():
    world = World()
    world.refuses = True
    asked = world.ask(30)
    await world.tick(10)
    assert (len(world.flushed), world.state(asked)) == (1, "waiting")
    await world.admissions.close()


@in_event_loop
async def test_grants_and_places_are_kept_over_a_restart():
    world = await World(reclaim="off").restarted()
    granted, first, second = world.ask(8, pid=1), world.ask(20), world.ask(5)
    await world.admissions.save()
    world.now = PROCESS_GRANT_SECONDS - 1
    world = await world.restarted()
    assert [world.state(each) for each in (granted, first, second)] == ["granted", "waiting", "waiting"]
    assert world.admissions.renew(with_free(10), second.id, "uid:1000").ahead == 1
    assert world.ask(1, wait=False).available_bytes == 2 * GIB - 25 * GIB
    with pytest.raises(NoSuchEntry):
        world.state(first, owner="uid:1001")
    await world.tick(28)
    assert [world.state(each) for each in (first, second)] == ["granted", "waiting"]
    world.now = PROCESS_GRANT_SECONDS  # the time continues
    await world.tick(28)
    assert world.state(second) == "granted"
    with pytest.raises(NoSuchEntry):
        world.state(granted)


@in_event_loop
async def test_grant_ends_with_a_process_that_ended_while_the_daemon_was_stopped():
    world = await World().restarted()
    world.ask(8, pid=1)
    await world.admissions.save()
    world = await world.restarted()
    world.alive = False
    assert world.ask(10, wait=False).state == "granted"


@in_event_loop
async def test_process_that_ended_while_the_daemon_was_stopped_has_no_place():
    world = await World(reclaim="off").restarted()
    world.ask(20, pid=1)
    await world.admissions.save()
    world = await world.restarted()
    world.alive = False
    assert world.ask(20).ahead == 0


@in_event_loop
async def test_grant_of_a_machine_that_was_started_again_does_not_last_longer():
    world = await World(now=1e6).restarted()
    world.ask(8)
    await world.admissions.save()
    world.now = 0.0
    world = await world.restarted()
    assert world.ask(8, wait=False).state == "refused"
    world.now = GRANT_SECONDS
    assert world.ask(8, wait=False).state == "granted"


@in_event_loop
async def test_requests_are_stored_only_when_they_change_and_never_before_they_are_loaded():
    world = World()
    world.ask(8)
    await world.admissions.save()
    await world.tick(10)
    assert world.store.changes == 0
    await world.admissions.load()
    asked = world.ask(20)
    for _ in range(3):
        await world.admissions.save()
        await world.tick(10)
    assert (world.store.changes, len(world.store.names("admissions"))) == (1, 2)
    world.admissions.cancel(asked.id, "uid:1000")
    world.now = GRANT_SECONDS
    await world.tick(10)
    assert (world.store.changes, world.store.names("admissions")) == (2, [])


@in_event_loop
async def test_requests_are_granted_without_a_store_and_stored_later():
    world = await World().restarted()
    world.store.full = True
    asked = world.ask(8)
    await world.admissions.save()
    assert (world.state(asked), world.store.names("admissions")) == ("granted", [])
    world.store.full = False
    await world.tick(10)
    assert world.store.names("admissions") == [asked.id]


@in_event_loop
async def test_place_is_kept_before_the_first_snapshot():
    world = await World().restarted()
    asked = world.ask(20)
    await world.admissions.save()
    world = await world.restarted()
    world.now = LEASE_SECONDS
    answer = world.admissions.renew(None, asked.id, "uid:1000")
    assert (answer.state, answer.available_bytes) == ("waiting", None)
    world.now = 2 * LEASE_SECONDS
    assert world.state(asked) == "waiting"


@in_event_loop
async def test_grant_that_its_program_does_not_use_halves_the_time_of_the_next():
    world = World()
    for seconds in (GRANT_SECONDS, GRANT_SECONDS / 2, GRANT_SECONDS / 4):
        assert world.ask(8, wait=False).state == "granted"
        world.now += seconds - 1
        assert world.ask(8, wait=False).state == "refused"
        world.now += 1
        await world.tick(10)
    assert world.ask(8, wait=False, owner="uid:1001").state == "granted"
    world.now += GRANT_SECONDS - 1
    assert world.ask(8, wait=False).state == "refused", "grants of another user have their whole time"


@in_event_loop
async def test_request_keeps_other_users_back_for_a_limited_time():
    world = World()
    first = world.ask(20)
    second = world.ask(5, owner="uid:1001")
    assert (first.state, second.state) == ("waiting", "waiting")
    for _ in range(int(MAX_BLOCKING_SECONDS // LEASE_SECONDS)):
        world.now += LEASE_SECONDS
        assert world.state(first) == "waiting"
        assert world.state(second, owner="uid:1001") == "waiting"
        await world.tick(10)
    assert world.state(second, owner="uid:1001") == "granted"
    assert world.state(first) == "waiting"
