"""Programs that run out of memory for a known reason, on simulated devices: run, read the case, apply its remedy.

`Plan` states what a program does; `run` plays it step by step against devices with other programs, as a caching
allocator would, and returns the case of its first out-of-memory error. `APPLY` carries out each remedy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gpumond.diagnosis.diagnosis import Diagnosis, diagnose
from gpumond.facts.engines import EngineProcess, EngineReading
from gpumond.facts.frame import Frame
from gpumond.facts.program import (
    ByteChange,
    Call,
    LiveClasses,
    Oom,
    OomPool,
    PoolLimit,
    Program,
    ScopeDevice,
    ScopeUsage,
    StepUsage,
)
from gpumond.facts.snapshot import AgentReport, DeviceReading, ProcessUsage, Snapshot
from gpumond.facts.units import GIB
from gpumond.features.oom.case import OomCase
from gpumond.features.oom.case_service import case_of
from gpumond.features.oom.remedies import Evidence
from gpumond.tick.ledger import make_ledger
from tests.helpers.values import make_device, make_pool, make_process, make_report, make_snapshot

MIB = 1 << 20
OWN = 10
CHUNKS = 8
OVERHEAD = 512 * MIB
START = 1_000_000.0


@dataclass(frozen=True, kw_only=True)
class Neighbor:
    """Another program on the device; without ``agent``, the driver's count is all that is known."""

    pid: int = 20
    live: int = 0
    cached: int = 0
    agent: bool = True
    uid: int = 1000
    allocator: str = "torch"
    workload: str = "notebook"
    policy: str = "allow"
    orphaned: bool | None = None
    engine: bool = False
    rank: int | None = None
    flushable: bool = True

    @property
    def held(self) -> int:
        return self.live + self.cached


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A training or serving program. Bytes of activations are those of one sample of usual length."""

    cause: str
    size: int = 80 * GIB
    weights: int = 4 * GIB
    trains: bool = True
    per_sample: int = GIB
    batch: int = 8
    data_set: int = 0
    kv_cache: int = 0
    kv_used: float | None = 1.0
    optimizer: float = 2.0
    leak: int = 0
    longest: float = 1.0
    """Length of the input of step 20 as a multiple of the usual one."""
    evaluation: int = 0
    evaluation_spike: int = 0
    fragments: int = 0
    """Bytes that each step leaves in pieces, up to ``most_fragments``."""
    most_fragments: int = 0
    ignored_block: int = 0
    """Largest free block that the allocator does not use."""
    own_cache: int = 0
    """Bytes that another allocator of the program caches."""
    spillable: int = 0
    limit: int | None = None
    rank: int | None = None
    steps: int = 40
    unattributed: int = 0
    neighbors: tuple[Neighbor, ...] = ()
    second_device: int | None = None
    """Size of an empty second device."""
    expandable: bool = False
    borrow: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)


class OutOfMemory(Exception):
    def __init__(self, request: int) -> None:
        super().__init__(request)
        self.request = request


class Run:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.neighbors = list(plan.neighbors)
        self.sizes = dict.fromkeys(("weights", "gradients", "optimizer", "tensors", "activations"), 0)
        self.cached = self.stranded = self.peak = self.step = self.passes = self.eval_peak = 0
        self.own_cache = plan.own_cache
        self.scope, self.at, self.now = "", "train.py", START
        self.kept: list[int] = []
        self.diagnosis = Diagnosis()
        self.frame = self.tick()

    @property
    def live(self) -> int:
        return sum(self.sizes.values())

    @property
    def held(self) -> int:
        return self.live + self.cached + self.stranded

    @property
    def free(self) -> int:
        plan = self.plan
        others = sum(each.held for each in self.neighbors) + plan.unattributed + self.own_cache
        return plan.size - others - self.held - OVERHEAD

    def allocate(self, kind: str, size: int) -> None:
        """Allocate as a caching allocator does: from its cache, from the device, then after it emptied its cache."""
        if size <= 0:
            return
        if size <= self.cached:
            self.cached -= size
        elif not self._room(size):
            self.cached = 0
            if self.plan.expandable:
                self.stranded = 0
            if not self._room(size) and self.plan.borrow:
                self.neighbors = [replace(each, cached=0) if each.flushable else each for each in self.neighbors]
            if not self._room(size):
                raise OutOfMemory(size)
        self.sizes[kind] += size
        self.peak = max(self.peak, self.live)

    def _room(self, size: int) -> bool:
        limit = self.plan.limit
        return size <= self.free and (limit is None or self.held + size <= limit)

    def release(self, kind: str, size: int) -> None:
        self.sizes[kind] -= size
        self.cached += size

    def tick(self) -> Frame:
        snapshot = self.snapshot()
        self.diagnosis = diagnose(self.diagnosis, snapshot)
        self.now += 1.0
        return Frame(snapshot, make_ledger(snapshot), tuple(self.diagnosis.verdicts))

    def play(self) -> None:
        """Raises OutOfMemory."""
        plan = self.plan
        self.allocate("weights", plan.weights)
        self.allocate("tensors", plan.data_set)
        self.allocate("tensors", plan.kv_cache)
        for self.step in range(plan.steps):
            self.frame = self.tick()
            factor = plan.longest if self.step == 20 else 1.0
            chunk = int(plan.per_sample * plan.batch * factor) // CHUNKS
            for _ in range(CHUNKS):
                self.allocate("activations", chunk)
            if plan.trains and not self.sizes["gradients"]:
                self.allocate("gradients", plan.weights)
            self.release("activations", chunk * CHUNKS)
            if plan.trains and not self.sizes["optimizer"]:
                self.at = "/env/torch/optim/adam.py"
                for _ in range(2):
                    self.allocate("optimizer", int(plan.weights * plan.optimizer) // 2)
                self.at = "train.py"
            self.allocate("tensors", plan.leak)
            self.kept.append(plan.leak)
            broken = min(plan.fragments, max(0, plan.most_fragments - self.stranded), self.cached)
            if not plan.expandable:
                self.stranded, self.cached = self.stranded + broken, self.cached - broken
            if plan.evaluation and self.step % 10 == 9:
                self._evaluate(plan.evaluation + (plan.evaluation_spike if self.step > 10 else 0))

    def _evaluate(self, size: int) -> None:
        self.scope = "evaluate"
        before = self.sizes["activations"]
        for _ in range(CHUNKS):
            self.allocate("activations", size // CHUNKS)
        self.eval_peak = max(self.eval_peak, self.live)
        self.passes += 1
        self.release("activations", self.sizes["activations"] - before)
        self.scope = ""

    def snapshot(self) -> Snapshot:
        plan = self.plan
        used = plan.size - self.free
        own = self.held + OVERHEAD + self.own_cache
        listed = (make_process(OWN, own, uid=1000), *(_listed(each) for each in self.neighbors if each.held))
        device = make_device(
            size_bytes=plan.size, used_bytes=used, free_bytes=self.free, processes=listed, name="simulated"
        )
        devices: tuple[DeviceReading, ...] = (device,)
        if plan.second_device is not None:
            size = plan.second_device
            devices += (make_device("GPU-b", index=1, size_bytes=size, used_bytes=0, free_bytes=size),)
        engines = tuple(_engine(each) for each in self.neighbors if each.engine)
        if plan.kv_cache:
            ratio, process = plan.kv_used, EngineProcess(OWN, 100)
            engines += (
                EngineReading(
                    name="chat",
                    kind="vllm",
                    up=True,
                    kv_cache_bytes=plan.kv_cache,
                    kv_cache_used_ratio=ratio,
                    processes=(process,),
                ),
            )
        return make_snapshot(
            *devices,
            seq=int(self.now - START) + 1,
            taken_at=self.now,
            elapsed_seconds=self.now - START + 1.0,
            reports=(self.report(), *(_report(each) for each in self.neighbors if each.agent)),
            engines=engines,
        )

    def report(self, *ooms: Oom) -> AgentReport:
        plan = self.plan
        pool = make_pool(
            live=self.live,
            cached=self.cached,
            stranded=self.stranded,
            peak_live_bytes=self.peak,
            spillable_bytes=plan.spillable or None,
        )
        pools = (pool,)
        if plan.own_cache:
            pools += (make_pool(allocator="cupy", cached=self.own_cache),)
        scopes = ()
        if self.passes:
            device = ScopeDevice("GPU-a", ByteChange(0), ByteChange(0), self.eval_peak, True)
            scopes = (ScopeUsage(name="evaluate", entries=self.passes, devices=(device,)),)
        step = StepUsage(steps=self.step, retained_bytes=sum(self.kept) / len(self.kept) if self.kept else None)
        limits = () if plan.limit is None else (PoolLimit("torch", "GPU-a", plan.limit, "students"),)
        return make_report(
            OWN,
            pools,
            program=Program(scopes=scopes, step=step, ooms=ooms, distributed=plan.rank is not None),
            limits=limits,
            rank=plan.rank,
            world_size=None if plan.rank is None else 2,
            **plan.fields,
        )

    def case(self, error: OutOfMemory) -> OomCase:
        """Return the case that a daemon makes of the agent's next report."""
        sizes = self.sizes
        results = 0 if self.plan.trains else sizes["activations"]  # without a graph, they are plain tensors
        classes = LiveClasses(
            allocator="torch",
            device_uuid="GPU-a",
            live_bytes=self.live,
            parameters_bytes=sizes["weights"],
            gradients_bytes=sizes["gradients"],
            optimizer_bytes=sizes["optimizer"],
            buffers_bytes=0,
            tensors_bytes=sizes["tensors"] + results,
            activations_bytes=sizes["activations"] - results,
        )
        block = self.plan.ignored_block or self.stranded // 40
        pools = (
            OomPool(
                allocator="torch",
                device_uuid="GPU-a",
                live_bytes=self.live,
                cached_bytes=self.cached,
                stranded_bytes=self.stranded,
                largest_free_bytes=block,
            ),
        )
        if self.plan.own_cache:
            pools += (
                OomPool(
                    allocator="cupy", device_uuid="GPU-a", live_bytes=0, cached_bytes=self.own_cache, stranded_bytes=0
                ),
            )
        oom = Oom(
            number=1,
            at=self.now + 0.5,
            seen="unhandled",
            device_uuid="GPU-a",
            request_bytes=error.request,
            scope=self.scope,
            pools=pools,
            stack=(Call(self.at, 31, "step"), Call("train.py", 60, "main")),
            classes=(classes,),
            free_bytes=max(0, self.free),
            allocator="torch",
        )
        evidence = Evidence(oom, self.report(oom), self.frame, tuple(self.diagnosis.verdicts))
        return case_of(evidence, self.diagnosis.history)


def run(plan: Plan) -> OomCase | None:
    """Return the case of the program's out-of-memory error; None if it finishes."""
    played = Run(plan)
    try:
        played.play()
    except OutOfMemory as error:
        return played.case(error)
    return None


def _listed(each: Neighbor) -> ProcessUsage:
    return make_process(each.pid, each.held, uid=each.uid, comm="python", orphaned=each.orphaned)


def _report(each: Neighbor) -> AgentReport:
    cached = each.cached if each.flushable else 0
    pool = make_pool(live=each.live, cached=cached, stranded=each.cached - cached, allocator=each.allocator)
    return make_report(
        each.pid,
        (pool,),
        uid=each.uid,
        workload=each.workload,
        flush_policy=each.policy,
        rank=each.rank,
        world_size=None if each.rank is None else 2,
        program=Program(distributed=each.rank is not None),
    )


def _engine(each: Neighbor) -> EngineReading:
    return EngineReading(
        name=each.workload,
        kind="vllm",
        up=True,
        sleeping=False,
        idle_seconds=900.0,
        processes=(EngineProcess(each.pid, 100),),
        uid=each.uid,
        methods=("sleep",),
    )


def without(plan: Plan, keep: Callable[[Neighbor], bool]) -> Plan:
    return replace(plan, neighbors=tuple(filter(keep, plan.neighbors)))


APPLY: Mapping[str, Callable[[Plan, OomCase], Plan]] = {
    "neighbor-cache": lambda plan, case: replace(plan, borrow=True),
    "idle-engine": lambda plan, case: without(plan, lambda each: not each.engine),
    "preallocation": lambda plan, case: replace(
        plan, neighbors=tuple(replace(each, cached=0) for each in plan.neighbors)
    ),
    "orphaned-process": lambda plan, case: without(plan, lambda each: not each.orphaned),
    "unattributed": lambda plan, case: replace(plan, unattributed=0),
    "ranks": lambda plan, case: without(plan, lambda each: each.rank is None),
    "other-device": lambda plan, case: replace(plan, size=plan.second_device or 0, neighbors=(), unattributed=0),
    "fragmentation": lambda plan, case: replace(plan, expandable=True),
    "free-block": lambda plan, case: replace(plan, most_fragments=0),
    "own-cache": lambda plan, case: replace(plan, own_cache=0),
    "spill": lambda plan, case: replace(plan, data_set=plan.data_set - plan.spillable),
    "limit": lambda plan, case: replace(plan, limit=(plan.limit or 0) + (case.remedies[0].size_bytes or 0)),
    "leak": lambda plan, case: replace(plan, leak=0),
    "data-set": lambda plan, case: replace(plan, data_set=plan.data_set // 100),
    "kv-cache": lambda plan, case: replace(plan, kv_cache=plan.kv_cache - (case.remedies[0].size_bytes or 0)),
    "earlier-peak": lambda plan, case: replace(plan, longest=1.0, evaluation_spike=0),
    "batch": lambda plan, case: replace(plan, batch=plan.batch // _parts(case)),
    "checkpointing": lambda plan, case: replace(plan, per_sample=plan.per_sample // 4),
    "optimizer": lambda plan, case: replace(plan, optimizer=0.0),
}


def _parts(case: OomCase) -> int:
    text = case.remedies[0].text
    return 2 if "half" in text else 4 if "quarter" in text else 8


SEEDED = (
    Plan(cause="neighbor-cache", batch=20, neighbors=(Neighbor(live=5 * GIB, cached=50 * GIB),)),
    Plan(
        cause="neighbor-cache",
        batch=24,
        neighbors=(Neighbor(live=2 * GIB, cached=20 * GIB), Neighbor(pid=21, live=GIB, cached=24 * GIB)),
    ),
    Plan(cause="leak", leak=2 * GIB, batch=8),
    Plan(cause="leak", leak=GIB, batch=30, neighbors=(Neighbor(live=4 * GIB, cached=4 * GIB),)),
    Plan(cause="fragmentation", batch=32, per_sample=GIB + GIB // 2, fragments=2 * GIB, most_fragments=40 * GIB),
    Plan(cause="free-block", batch=32, fragments=3 * GIB, most_fragments=50 * GIB, ignored_block=9 * GIB),
    Plan(cause="limit", limit=25 * GIB + GIB // 2, weights=18 * GIB, trains=False, optimizer=0.0, batch=8),
    Plan(cause="batch", batch=100),
    Plan(cause="batch", batch=64, weights=8 * GIB, trains=False, optimizer=0.0, per_sample=2 * GIB),
    Plan(cause="earlier-peak", evaluation=8 * GIB, evaluation_spike=60 * GIB, batch=8),
    Plan(cause="earlier-peak", longest=6.0, batch=16),
    Plan(
        cause="kv-cache",
        trains=False,
        weights=14 * GIB,
        kv_cache=60 * GIB,
        kv_used=0.2,
        batch=8,
        optimizer=0.0,
        steps=9,
    ),
    Plan(cause="ranks", rank=0, batch=40, neighbors=(Neighbor(live=38 * GIB, rank=1, workload="train"),)),
    Plan(cause="data-set", data_set=62 * GIB, batch=8),
    Plan(cause="optimizer", weights=22 * GIB, batch=4, per_sample=GIB // 2),
    Plan(
        cause="optimizer", weights=22 * GIB, batch=4, per_sample=GIB // 2, fragments=GIB // 2, most_fragments=GIB // 2
    ),
    Plan(cause="other-device", batch=24, second_device=80 * GIB, neighbors=(Neighbor(live=50 * GIB, agent=False),)),
    Plan(cause="own-cache", batch=24, own_cache=40 * GIB),
    Plan(
        cause="idle-engine",
        batch=24,
        neighbors=(Neighbor(live=60 * GIB, agent=False, workload="chat-b", engine=True),),
    ),
    Plan(
        cause="preallocation",
        batch=24,
        neighbors=(Neighbor(live=2 * GIB, cached=58 * GIB, allocator="jax", workload="jax-b", flushable=False),),
    ),
    Plan(cause="orphaned-process", batch=24, neighbors=(Neighbor(live=55 * GIB, agent=False, orphaned=True),)),
    Plan(cause="unattributed", batch=24, unattributed=50 * GIB),
    Plan(cause="nothing", weights=111 * GIB, batch=1),
)
"""Programs by the name of the remedy that removes their cause."""
