"""Random histories in virtual time: programs are suspended and resumed while others take and return memory, and while
daemons, helpers and disks fail at any point.

The parts of the daemon are real: recognition of suspensions, requests for memory, and the suspender. The driver and the
helper are simulated, with a restore that never returns if it runs out of memory.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal, TypeVar

import pytest

from gpumond.core import Clock
from gpumond.facts.errors import NoSuchEntry, TooManyAdmissions
from gpumond.facts.flush import FlushRequest, FlushResponse
from gpumond.facts.pools import PoolUsage, Reclaimable
from gpumond.facts.program import ProcessKey
from gpumond.facts.snapshot import AgentReport, DeviceReading, ProcessUsage, Reading, Snapshot, SourceState
from gpumond.features.quotas.admissions import Admissions
from gpumond.features.suspend.checkpoint_process import CheckpointRequest, CheckpointResponse
from gpumond.features.suspend.decision import HostState, SuspendRequest
from gpumond.features.suspend.suspender import Suspender
from gpumond.tick.observe import observe
from tests.helpers.memory_store import MemoryStore
from tests.helpers.virtual_time import run

T = TypeVar("T")
GIB, SIZE, UID = 1 << 30, 80, 1000
TICK, SECONDS = 2.0, 240.0
SOURCE = SourceState(name="nvml", up=True, responsive=True, driver_version="580.159.04")
UUIDS = ("GPU-0", "GPU-1")
State = Literal["running", "locked", "checkpointed", "failed"]


@dataclass
class Program:
    """``sizes``: GiB by device. ``helper``: one works on it."""

    key: ProcessKey
    sizes: dict[str, int]
    suspendable: bool
    state: State = "running"
    alive: bool = True
    helper: bool = False
    restores: int = 0
    problems: list[str] = field(default_factory=list)


class FailingStore(MemoryStore):
    """Kills the daemon before or after a change, or refuses it."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        self.full = self._world.chance(0.03)
        await self._world.perhaps_kill()
        done = await super().run(work)
        await self._world.perhaps_kill()
        return done


class World:
    """``faulty``: daemons, helpers and the disk may fail. ``outsiders``: programs also take memory without a grant."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.faulty, self.outsiders = True, seed % 4 == 0
        self.loop = asyncio.get_running_loop()
        self.programs: dict[int, Program] = {}
        self.store = FailingStore(self)
        self.daemon: asyncio.Task[None] | None = None
        self.helpers: set[asyncio.Task[Any]] = set()
        self.requests: set[asyncio.Task[Any]] = set()
        self.snapshot: Snapshot | None = None
        self.kills = self.cycles = 0

    def chance(self, probability: float) -> bool:
        return self.faulty and self.random.random() < probability

    async def perhaps_kill(self) -> None:
        """Kill the daemon: the calling task ends here, and all its others."""
        if self.daemon is not None and self.chance(0.03):
            self.kills += 1
            for task in (self.daemon, *self.suspender._tasks, *self.requests):
                task.cancel()
            self.daemon = None
            await asyncio.sleep(0)

    # the machine

    def free(self, uuid: str) -> int:
        return SIZE - sum(each.sizes.get(uuid, 0) for each in self.programs.values() if self.is_held(each))

    def is_held(self, program: Program) -> bool:
        return program.alive and program.state in ("running", "locked")

    def start(self, sizes: dict[str, int], suspendable: bool) -> Program:
        pid = 100 + len(self.programs)
        program = self.programs[pid] = Program(ProcessKey(pid, pid), sizes, suspendable)
        return program

    def find(self, pid: int) -> tuple[ProcessKey, int] | None:
        program = self.programs.get(pid)
        return (program.key, UID) if program and program.alive else None

    async def read(self) -> Reading:
        return Reading(devices=tuple(map(self.device, UUIDS)), driver_version=SOURCE.driver_version)

    def device(self, uuid: str) -> DeviceReading:
        listed = [each for each in self.programs.values() if self.is_held(each) and uuid in each.sizes]
        free = self.free(uuid)
        return DeviceReading(
            uuid=uuid,
            index=UUIDS.index(uuid),
            vendor="nvidia",
            size_bytes=SIZE * GIB,
            used_bytes=(SIZE - free) * GIB,
            free_bytes=free * GIB,
            processes=tuple(
                ProcessUsage(
                    pid=each.key.pid,
                    start_ticks=each.key.start_ticks,
                    used_bytes=each.sizes[uuid] * GIB,
                    kinds=("compute",),
                    uid=UID,
                )
                for each in listed
            ),
        )

    def report(self, program: Program) -> AgentReport:
        pools = tuple(_pool(uuid, (size - 1) * GIB) for uuid, size in program.sizes.items())
        return AgentReport(
            pid=program.key.pid,
            start_ticks=program.key.start_ticks,
            uid=UID,
            workload=f"program-{program.key.pid}",
            age_seconds=0.5,
            frameworks=(),
            flush_policy="never",
            pools=pools,
            suspendable=program.suspendable,
        )

    # the driver, and the helper that calls it

    async def ask(self, request: CheckpointRequest, seconds: float) -> CheckpointResponse | None:
        program = self.programs[request.pid]
        if program.helper:
            return None
        program.helper = True
        work = self.loop.create_task(self.help(request, program))
        self.helpers.add(work)
        await self.perhaps_kill()
        done, _ = await asyncio.wait({work}, timeout=seconds)
        return work.result() if done else None

    def remove_lock_file(self, order_id: str) -> None: ...

    async def help(self, request: CheckpointRequest, program: Program) -> CheckpointResponse:
        """Do what checkpoint_process.carry_out does, with time between the calls, in which anything may happen."""
        try:
            if request.action == "suspend" and program.state == "running":
                program.state = "locked"
                await self.pass_time(program)
                if not self.chance(0.1):
                    program.state = "checkpointed"
                    self.cycles += 1
                    return self.answer(program)
                program.state = "running"
            elif request.action == "resume" and program.state == "checkpointed":
                self.check_grants(program)
                await self.pass_time(program)
                self.check_grants(program)
                if any(self.free(uuid) < size for uuid, size in program.sizes.items()):
                    program.state = "failed"
                    await asyncio.sleep(1e9)  # cuda-checkpoint#44
                program.state = "locked"
                program.restores += 1
                await self.pass_time(program)
                program.state = "running"
            elif program.state == "locked":
                program.state = "running"
            return self.answer(program)
        except _HelperKilled:
            return CheckpointResponse(error="the helper ended without an answer")
        finally:
            program.helper = False

    async def pass_time(self, program: Program) -> None:
        await asyncio.sleep(self.random.choice((0.0, 1.0, 20.0)))
        if self.chance(0.05):
            raise _HelperKilled
        if not program.alive:
            raise _HelperKilled

    def answer(self, program: Program) -> CheckpointResponse:
        return CheckpointResponse(state=program.state if program.alive else "gone", host_bytes=GIB)

    def check_grants(self, program: Program) -> None:
        """The store and the daemon, if one has read it, hold a grant of the whole size on each device."""
        if not program.alive:
            return
        rows = self.store._db.execute("SELECT body FROM admissions").fetchall()
        stored = [json.loads(body) for (body,) in rows]
        for uuid, size in program.sizes.items():
            own = [each for each in stored if (each["pid"], each["device_uuid"]) == (program.key.pid, uuid)]
            if not any(each["need_bytes"] >= size * GIB and (each["deadline"] or 0) > self.loop.time() for each in own):
                program.problems.append(f"the store has no grant for a restore at {self.loop.time()}")
            grants = {each.id for each in self.admissions._queue.grants if each.deadline > self.loop.time()}
            if self.daemon is not None and self.admissions.loaded and not grants & {each["id"] for each in own}:
                program.problems.append(f"the daemon has no grant for a restore at {self.loop.time()}")

    # the daemon

    async def boot(self) -> None:
        """Start a daemon on the store of the last one."""
        self.snapshot = None
        clock = Clock(wall=self.loop.time, monotonic=self.loop.time, uptime=self.loop.time)
        self.admissions = Admissions(self.flush, lambda: "user", self.find, self.loop.time, self.store)
        self.suspender = Suspender(
            allowed=lambda: True,
            idle_seconds=lambda: 0.0,
            snapshot=lambda: self.snapshot,
            read_driver=self.read,
            admissions=self.admissions,
            processes=self,
            host_state=self.host_state,
            is_alive=lambda key: self.programs[key.pid].alive,
            has_pending_sigcont=lambda key: False,
            is_flushing=lambda report: False,
            store=self.store,
            audit=self.note,
            publish=lambda receipt: None,
            wake=lambda: None,
            clock=clock,
        )
        self.daemon = self.loop.create_task(self.tick_for_ever())
        await asyncio.sleep(0)

    async def tick_for_ever(self) -> None:
        while not (self.admissions.loaded and self.suspender.loaded):
            try:
                await self.admissions.load()
                await self.suspender.load()
            except Exception:
                await asyncio.sleep(TICK)
        while True:
            reading = await self.read()
            reports = [self.report(each) for each in self.programs.values() if each.alive]
            now = self.loop.time()
            snapshot = observe(self.snapshot, SOURCE, reading, reports, taken_at=now, elapsed_seconds=now)
            self.snapshot = self.suspender.observe(snapshot)
            self.admissions.execute(self.snapshot)
            self.suspender.execute(self.snapshot)
            await asyncio.sleep(TICK)

    async def flush(self, request: FlushRequest, requested_by: str) -> FlushResponse:
        return FlushResponse("id", (), 0)

    async def host_state(self, process: ProcessKey, listed: Collection[ProcessKey]) -> HostState:
        return HostState(free_host_bytes=1000 * GIB)

    async def note(self, actor: str, action: str, detail: Mapping[str, Any]) -> None: ...

    # what people do

    async def act(self) -> None:
        if self.daemon is None:
            if self.random.random() < 0.3:
                await self.boot()
            return
        program = self.random.choice(list(self.programs.values()))
        kind = self.random.choice(["suspend", "suspend", "resume", "resume", "resume", "end", "start", "need", "need"])
        if kind == "suspend" and program.suspendable:
            self.request(self.suspender.suspend(SuspendRequest(process=program.key), "uid:1000"))
        elif kind == "resume" and program.suspendable:
            wait = self.random.choice((0.0, 30.0, 120.0))
            self.request(self.suspender.resume(program.key, self.random.choice(("uid:1000", "admin")), None, wait))
        elif kind == "end" and (not program.suspendable or self.random.random() < 0.1):
            program.alive = False
        elif kind == "start" and self.outsiders:
            uuid = self.random.choice(UUIDS)
            if (free := self.free(uuid)) > 2:
                self.start({uuid: self.random.randint(1, free)}, suspendable=False)
        elif kind == "need" and self.snapshot is not None:
            self.request(self.need(self.random.choice(UUIDS), self.random.randint(5, SIZE)))

    async def need(self, uuid: str, size: int) -> None:
        """Be a program that asks for memory first, as `gpumond run --need` does."""
        admissions, snapshot = self.admissions, self.snapshot
        device = snapshot.device(uuid) if snapshot else None
        if snapshot is None or device is None:
            return
        program = self.start({}, suspendable=False)
        try:
            asked = admissions.request(
                snapshot, device, size * GIB, "uid:2000", uid=UID, pid=program.key.pid, wait=self.random.random() < 0.5
            )
        except TooManyAdmissions:
            return
        for _ in range(20):
            if asked.state == "granted":
                program.sizes[uuid] = size
                return
            await asyncio.sleep(TICK)
            if admissions is not self.admissions or asked.state == "refused":
                return
            try:
                asked = admissions.renew(self.snapshot, asked.id, "uid:2000")
            except NoSuchEntry:
                return

    def request(self, work: Any) -> None:
        task = self.loop.create_task(work)
        self.requests.add(task)
        task.add_done_callback(self.requests.discard)


class _HelperKilled(Exception):
    pass


def _pool(uuid: str, size: int) -> PoolUsage:
    return PoolUsage(
        allocator="torch",
        device_uuid=uuid,
        live_bytes=size,
        held_bytes=size,
        reclaimable=Reclaimable(0, 0, 0),
        stranded_bytes=0,
    )


async def history(seed: int) -> World:
    world = World(seed)
    for sizes in ({"GPU-0": 30}, {"GPU-0": 20, "GPU-1": 20}, {"GPU-1": 50}):
        world.start(dict(sizes), suspendable=True)
    await world.boot()
    while world.loop.time() < SECONDS:
        await world.act()
        await asyncio.sleep(world.random.expovariate(0.5))
    await settle(world)
    return world


async def settle(world: World) -> None:
    """Let everything end that others have begun, and resume what is suspended."""
    world.faulty = False
    if world.daemon is None:
        await world.boot()
    for program in world.programs.values():
        program.alive = program.alive and program.suspendable
    for _ in range(40):
        if not world.suspender.programs:
            break
        await asyncio.sleep(50)
        for key, each in list(world.suspender.programs.items()):
            if each.state == "suspended":
                await world.suspender.resume(key, "uid:1000", None, 60)
    await asyncio.sleep(20)
    left = [world.daemon, *world.helpers, *world.requests]
    for task in left:
        if task is not None:
            task.cancel()
    await world.suspender.close()
    await asyncio.gather(*(task for task in left if task), return_exceptions=True)


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, *(pytest.param(each, marks=pytest.mark.soak) for each in range(50, 1000, 50))])
def test_no_restore_without_a_grant_and_no_program_is_lost(first: int) -> None:
    kills = cycles = restores = 0
    for seed in range(first, first + 50):
        world, _ = run(history(seed))
        kills, cycles = kills + world.kills, cycles + world.cycles
        for program in world.programs.values():
            restores += program.restores
            assert not program.problems, (seed, program)
            if program.suspendable and program.alive and not (world.outsiders and program.state == "failed"):
                assert program.state == "running", (seed, program, world.suspender.programs)
        if not world.outsiders:
            assert not world.suspender.programs, (seed, world.suspender.programs)
            assert not [each for each in world.admissions._queue.grants if each.whole], seed
    assert min(kills, cycles, restores) > 50
