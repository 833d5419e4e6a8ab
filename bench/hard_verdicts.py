"""Ends, starts and memory without an owner that are hard to judge: each has a verdict that it deserves, or does not.

A case is drawn from rng. `wrong` runs it in virtual time, with a sample a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf
from random import Random

from bench.hard_shapes import DEVICE_BYTES, GIB, HOUR, MIB, MINUTE, Curve
from gpumond.diagnosis.diagnosis import Diagnosis, diagnose
from gpumond.facts.program import Ending, Program, StepUsage
from gpumond.facts.snapshot import ProcessEnd, Sensors, Snapshot, XidErrors
from gpumond.facts.verdicts import VerdictName
from tests.helpers.values import make_device, make_pool, make_process, make_report, make_snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """A process. Its functions take the seconds since its start.

    ``live``: bytes in use by its pools, None without an agent. ``ooms`` and ``steps``: numbers of failed
    allocations and of steps. ``ending``: what its agent announces.
    """

    used: Curve
    begin: float = 0.0
    end: float = inf
    comm: str = "python"
    uid: int = 1000
    live: Curve | None = None
    ooms: Callable[[float], int] = lambda at: 0
    steps: Callable[[float], int] = int
    ending: Ending | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """``deserves``: whether the verdict ``kind`` is right. ``rest``: bytes without an owner. ``xids``: by time."""

    kind: VerdictName
    deserves: bool
    actors: Sequence[Actor]
    minutes: float = 12.0
    rest: Curve = lambda at: 300.0 * MIB
    busy: Curve = lambda at: 0.7
    xids: tuple[tuple[float, int], ...] = ()
    private: bool = False
    every: float = 1.0


CaseMaker = Callable[[Random], Case]


def judge(maker: CaseMaker, seed: int) -> tuple[Case, bool]:
    """Return a case, and whether its verdict is found although it is not deserved, or not found although it is."""
    case = maker(Random(f"{maker.__name__}/{seed}"))
    diagnosis, found = Diagnosis(), False
    for snapshot in _snapshots(case, Random(seed)):
        diagnosis = diagnose(diagnosis, snapshot)
        found = found or any(verdict.kind == case.kind for verdict in diagnosis.verdicts)
    return case, found != case.deserves


def _snapshots(case: Case, rng: Random) -> Iterator[Snapshot]:
    for number in range(int(case.minutes * MINUTE / case.every)):
        at = number * case.every
        processes, reports = [], []
        for place, actor in enumerate(case.actors):
            age = at - actor.begin
            if age < 0 or at >= actor.end:
                continue
            used = int(min(actor.used(age), DEVICE_BYTES)) // MIB * MIB
            pid, start = 10 + place, 100 + place
            processes.append(make_process(pid, used, start_ticks=start, comm=actor.comm, uid=actor.uid))
            if actor.live is not None:
                live = int(actor.live(age))
                pool = make_pool(live=live, stranded=max(0, used - 600 * MIB - live), ooms=actor.ooms(age))
                program = Program(step=StepUsage(steps=actor.steps(age), live_bytes=live))
                report = make_report(pid, (pool,), start_ticks=start, workload=actor.comm, program=program)
                reports.append(report)
        ends = tuple(
            ProcessEnd(pid=10 + place, start_ticks=100 + place, ending=actor.ending)
            for place, actor in enumerate(case.actors)
            if actor.ending is not None and actor.end - case.every <= at < actor.end
        )
        used = sum(process.used_bytes or 0 for process in processes) + int(case.rest(at))
        device = make_device(
            used_bytes=min(DEVICE_BYTES, used),
            size_bytes=DEVICE_BYTES,
            vendor="nvidia",
            processes=tuple(processes),
            sensors=Sensors(gpu_utilization_ratio=case.busy(at)),
        )
        xids = tuple(XidErrors("GPU-a", xid, 1, 1e9 + when) for when, xid in case.xids if at >= when)
        yield make_snapshot(
            device,
            seq=number + 1,
            elapsed_seconds=at + 1,
            taken_at=1e9 + at,
            reports=tuple(reports),
            ends=ends,
            xids=xids,
            private_pid_namespace=case.private,
        )


def _load(rng: Random, high: float, seconds: tuple[float, float] = (10, 60)) -> Curve:
    length = rng.uniform(*seconds)
    return lambda age: high * min(1.0, age / length)


def _then(first: Curve, at: float, later: Curve) -> Curve:
    return lambda age: first(age) if age < at else later(age - at)


# Pressure: starts, teeth and warm-ups are none; a leak, and a device that is nearly full, are.


def model_load(rng: Random) -> Case:
    low, high = rng.uniform(10, 25) * GIB, rng.uniform(66, 74) * GIB
    start, length = rng.uniform(30, 90), rng.uniform(20, 60)
    return Case(
        kind="pressure",
        deserves=False,
        actors=[Actor(used=lambda age: low + (high - low) * min(1.0, max(0.0, age - start) / length))],
        minutes=6,
    )


def model_in_shards(rng: Random) -> Case:
    count, pause, high = rng.randint(4, 9), rng.uniform(4, 12), rng.uniform(64, 74) * GIB
    return Case(
        kind="pressure",
        deserves=False,
        actors=[Actor(used=lambda age: high * min(count, age // pause) / count)],
        minutes=6,
    )


def engine_start(rng: Random) -> Case:
    high = rng.uniform(0.86, 0.94) * DEVICE_BYTES
    return Case(kind="pressure", deserves=False, actors=[Actor(used=_load(rng, high, (30, 120)))], minutes=8)


def second_program_starts(rng: Random) -> Case:
    base, more = rng.uniform(20, 35) * GIB, rng.uniform(30, 38) * GIB
    return Case(
        kind="pressure",
        deserves=False,
        actors=[Actor(used=lambda age: base), Actor(used=_load(rng, more, (30, 100)), begin=400.0, comm="other")],
        minutes=12,
    )


def saw_tooth(rng: Random) -> Case:
    length, high = rng.uniform(3, 6) * MINUTE, rng.uniform(0.3, 0.36)
    return Case(
        kind="pressure",
        deserves=False,
        actors=[Actor(used=lambda age: (0.5 + high * (age % length) / length) * DEVICE_BYTES)],
        minutes=30,
    )


def slow_warm_up(rng: Random) -> Case:
    high, tau = rng.uniform(0.84, 0.88) * DEVICE_BYTES, rng.uniform(1, 4) * MINUTE
    return Case(
        kind="pressure", deserves=False, actors=[Actor(used=lambda age: high * (1 - exp(-age / tau)))], minutes=25
    )


def leak_fills(rng: Random) -> Case:
    rate = rng.uniform(3.5, 7) * GIB / MINUTE
    return Case(
        kind="pressure",
        deserves=True,
        actors=[Actor(used=lambda age: 20 * GIB + rate * max(0.0, age - 400))],
        minutes=24,
    )


def nearly_full(rng: Random) -> Case:
    high = rng.uniform(0.955, 0.99) * DEVICE_BYTES
    return Case(kind="pressure", deserves=True, actors=[Actor(used=_load(rng, high))], minutes=5)


# Ends: a crash needs the process's own growth, its own failed allocation, or an error that ends programs.


def _grows_to(rng: Random, share: float, seconds: float) -> Curve:
    rate = (share * DEVICE_BYTES - 20 * GIB) / seconds
    return lambda age: min(share * DEVICE_BYTES, 20 * GIB + rate * age)


def leak_ends_full(rng: Random) -> Case:
    seconds = rng.uniform(300, 900)
    return Case(
        kind="crash",
        deserves=True,
        actors=[Actor(used=_grows_to(rng, 0.994, seconds), end=seconds + rng.uniform(0, 15))],
        minutes=18,
    )


def slow_leak_ends_full(rng: Random) -> Case:
    """The last bytes of a slow leak are minutes old."""
    rate = rng.uniform(3, 8) * MIB / MINUTE
    begin = 0.985 * DEVICE_BYTES
    length = (0.992 * DEVICE_BYTES - begin) / rate
    return Case(
        kind="crash",
        deserves=True,
        actors=[Actor(used=lambda age: begin + rate * age, end=length)],
        minutes=length / MINUTE + 2,
        every=5.0,
    )


def failed_allocation(rng: Random) -> Case:
    fails = rng.uniform(200, 500)
    return Case(
        kind="crash",
        deserves=True,
        actors=[
            Actor(
                used=lambda age: 66 * GIB,
                live=lambda age: 60 * GIB,
                ooms=lambda age: int(age > fails),
                steps=lambda age: int(min(age, fails)),
                end=fails + 4,
                ending=rng.choice((None, "error", "out-of-memory")),
            )
        ],
    )


def fatal_xid(rng: Random) -> Case:
    at = rng.uniform(200, 500)
    return Case(
        kind="crash",
        deserves=True,
        actors=[Actor(used=lambda age: 40 * GIB, end=at + rng.uniform(2, 40))],
        xids=((at, rng.choice((13, 31, 48, 74, 79, 94, 95))),),
    )


def batch_ends_full(rng: Random) -> Case:
    """The agent announces an orderly end."""
    seconds = rng.uniform(200, 400)
    curve = _grows_to(rng, 0.985, seconds)
    live: Curve = lambda age: curve(age) - GIB  # noqa: E731
    return Case(kind="crash", deserves=False, actors=[Actor(used=curve, live=live, end=seconds + 20, ending="exit")])


def batch_rests_full(rng: Random) -> Case:
    """Without an agent: it reached its level some time before its end."""
    seconds = rng.uniform(100, 200)
    end = seconds + rng.uniform(240, 400)
    return Case(kind="crash", deserves=False, actors=[Actor(used=_grows_to(rng, 0.98, seconds), end=end)])


def engine_restarts(rng: Random) -> Case:
    every, high = rng.uniform(90, 200), rng.uniform(0.9, 0.99) * DEVICE_BYTES
    lives = [Actor(used=_load(rng, high), begin=i * every, end=(i + 1) * every - 4, comm="vllm") for i in range(4)]
    return Case(kind="crash", deserves=False, actors=lives, minutes=4 * every / MINUTE)


def neighbor_fills(rng: Random) -> Case:
    end = rng.uniform(400, 600)
    large: Curve = lambda age: min(75.6, 40 + age / 10) * GIB  # noqa: E731
    return Case(
        kind="crash",
        deserves=False,
        actors=[Actor(used=large), Actor(used=lambda age: 4 * GIB, end=end, comm="small")],
    )


def handled_error(rng: Random) -> Case:
    fails = rng.uniform(200, 400)
    return Case(
        kind="crash",
        deserves=False,
        actors=[
            Actor(
                used=lambda age: 60 * GIB,
                live=lambda age: (50 if age < fails else 40 + 6 * min(1.0, (age - fails) / 20)) * GIB,
                ooms=lambda age: int(age > fails),
                end=fails + rng.uniform(40, 150),
                ending=rng.choice((None, "exit")),
            )
        ],
    )


def harmless_xid(rng: Random) -> Case:
    at = rng.uniform(200, 500)
    return Case(
        kind="crash",
        deserves=False,
        actors=[Actor(used=lambda age: 40 * GIB, end=at + rng.uniform(2, 90))],
        xids=((at, rng.choice((45, 63, 64, 92))),),
    )


def end_in_the_middle(rng: Random) -> Case:
    end = rng.uniform(200, 600)
    return Case(kind="crash", deserves=False, actors=[Actor(used=_load(rng, rng.uniform(20, 60) * GIB), end=end)])


# Loops: crashes of one program; jobs that end alike are none.


def loop(rng: Random) -> Case:
    every = rng.uniform(300, 700)
    lives = [
        Actor(used=_grows_to(rng, 0.994, every - 60), begin=i * every, end=(i + 1) * every - 50, comm="train", uid=1000)
        for i in range(4)
    ]
    return Case(kind="crash-loop", deserves=True, actors=lives, minutes=4 * every / MINUTE)


def batch_jobs(rng: Random) -> Case:
    every = rng.uniform(280, 400)
    live: Curve = lambda age: 50 * GIB  # noqa: E731
    lives = [
        Actor(
            used=_grows_to(rng, 0.99, every - 60),
            live=live,
            begin=i * every,
            end=(i + 1) * every - 20,
            comm="batch",
            ending="exit",
        )
        for i in range(4)
    ]
    return Case(kind="crash-loop", deserves=False, actors=lives, minutes=4 * every / MINUTE)


def inference_jobs(rng: Random) -> Case:
    every, high = rng.uniform(110, 160), rng.uniform(0.96, 0.985) * DEVICE_BYTES
    lives = [Actor(used=_load(rng, high, (5, 30)), begin=i * every, end=(i + 1) * every - 5) for i in range(6)]
    return Case(kind="crash-loop", deserves=False, actors=lives, minutes=6 * every / MINUTE)


def scripts_of_three_users(rng: Random) -> Case:
    every = rng.uniform(400, 700)
    lives = [
        Actor(used=_grows_to(rng, 0.994, every - 60), begin=i * every, end=(i + 1) * every - 50, uid=1000 + i)
        for i in range(3)
    ]
    return Case(kind="crash-loop", deserves=False, actors=lives, minutes=3 * every / MINUTE)


# Memory without an owner, that is kept, or that was freed.


def abandoned(rng: Random) -> Case:
    end, size = rng.uniform(200, 400), rng.uniform(2, 40) * GIB
    return Case(
        kind="orphan",
        deserves=True,
        actors=[Actor(used=lambda age: size, end=end)],
        rest=lambda at: 300 * MIB + (size if at >= end else 0),
        busy=lambda at: 0.6 if at < end else 0.0,
    )


def abandoned_beside_a_busy_program(rng: Random) -> Case:
    size = rng.uniform(2.4, 12) * GIB
    return Case(
        kind="orphan", deserves=True, actors=[Actor(used=lambda age: 20 * GIB)], rest=lambda at: size, minutes=15
    )


def memory_of_another_container(rng: Random) -> Case:
    size = rng.uniform(10, 60) * GIB
    return Case(
        kind="orphan", deserves=False, actors=[], rest=lambda at: size, busy=lambda at: 0.0, private=True, minutes=15
    )


def memory_of_the_driver(rng: Random) -> Case:
    size = rng.uniform(200, 480) * MIB
    return Case(kind="orphan", deserves=False, actors=[], rest=lambda at: size, busy=lambda at: 0.0, minutes=15)


def idle_notebook(rng: Random) -> Case:
    return Case(
        kind="idle-holder",
        deserves=True,
        actors=[Actor(used=_load(rng, rng.uniform(6, 40) * GIB), comm="jupyter")],
        busy=lambda at: 0.6 if at < 300 else 0.0,
        minutes=45,
    )


def notebook_that_works_at_times(rng: Random) -> Case:
    every = rng.uniform(10, 20) * MINUTE
    return Case(
        kind="idle-holder",
        deserves=False,
        actors=[Actor(used=_load(rng, 20 * GIB), comm="jupyter")],
        busy=lambda at: 0.5 if at % every < 60 else 0.0,
        minutes=60,
    )


def engine_sleeps(rng: Random) -> Case:
    at, awake = rng.uniform(300, 600), rng.uniform(40, 72) * GIB
    return Case(
        kind="memory-freed",
        deserves=True,
        actors=[Actor(used=_then(_load(rng, awake), at, lambda age: 1.2 * GIB), comm="vllm")],
    )


def program_frees_a_little(rng: Random) -> Case:
    at = rng.uniform(300, 600)
    return Case(
        kind="memory-freed",
        deserves=False,
        actors=[Actor(used=_then(lambda age: 40 * GIB, at, lambda age: rng.uniform(30, 36) * GIB))],
    )


def splinters(rng: Random) -> Case:
    hourly, hours = rng.uniform(1, 4) * GIB / HOUR, rng.uniform(5, 8)
    return Case(
        kind="fragmentation",
        deserves=True,
        actors=[Actor(used=lambda age: 31 * GIB + hourly * age, live=lambda age: 20 * GIB)],
        minutes=60 * hours,
        every=10.0,
    )


def constant_waste(rng: Random) -> Case:
    waste = rng.uniform(8, 14) * GIB
    return Case(
        kind="fragmentation",
        deserves=False,
        actors=[Actor(used=_load(rng, 20 * GIB + waste), live=lambda age: min(20 * GIB, age * GIB))],
        minutes=120,
        every=5.0,
    )


def waste_between_evaluations(rng: Random) -> Case:
    every = rng.uniform(10, 30) * MINUTE
    return Case(
        kind="fragmentation",
        deserves=False,
        actors=[
            Actor(
                used=lambda age: (22 if age < every else 37) * GIB,
                live=lambda age: (35 if age >= every and age % every < 60 else 20) * GIB,
            )
        ],
        minutes=150,
        every=5.0,
    )


CASES: Mapping[str, CaseMaker] = {
    one.__name__: one
    for one in (
        model_load,
        model_in_shards,
        engine_start,
        second_program_starts,
        saw_tooth,
        slow_warm_up,
        leak_fills,
        nearly_full,
        leak_ends_full,
        slow_leak_ends_full,
        failed_allocation,
        fatal_xid,
        batch_ends_full,
        batch_rests_full,
        engine_restarts,
        neighbor_fills,
        handled_error,
        harmless_xid,
        end_in_the_middle,
        loop,
        batch_jobs,
        inference_jobs,
        scripts_of_three_users,
        abandoned,
        abandoned_beside_a_busy_program,
        memory_of_another_container,
        memory_of_the_driver,
        idle_notebook,
        notebook_that_works_at_times,
        engine_sleeps,
        program_frees_a_little,
        splinters,
        constant_waste,
        waste_between_evaluations,
    )
}
