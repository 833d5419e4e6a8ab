"""Oracle: incidents of a simulated week, and the alerts expected for them.

An incident is a generator that yields once a tick. It tells the oracle the expected alerts when it begins, and when it
is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, cycle

from gpumond.facts.frame import Alert
from gpumond.facts.units import GIB, MIB
from tests.helpers.simulated_program import Process
from tests.helpers.world import SIZE_BYTES, TICK_SECONDS, UP, UUIDS, World

PAUSE_SECONDS = 1500.0
"""Time between two incidents, so values counted over a window expire."""
LATEST_END_SECONDS = 1800.0
YEAR_SECONDS = 365 * 86400.0


@dataclass(eq=False)
class Expected:
    """Alert with at least these labels, which begins at ``due`` at the latest and ends at ``end_due`` at the latest."""

    rule: str
    labels: dict[str, str]
    due: float
    end_due: float | None = None
    raised: bool = False
    resolved: bool = False


@dataclass
class Oracle:
    """Missing alerts, unexpected alerts, and alerts that ended early. Everything may be late by ``slack`` seconds."""

    slack: float = 0.0
    now: float = 0.0
    expected: int = 0
    wrong: list[str] = field(default_factory=list)
    _open: list[Expected] = field(default_factory=list)

    def expect(self, rule: str, within: float, **labels: str) -> Expected:
        self.expected += 1
        self._open.append(Expected(rule, labels, self.now + within + self.slack))
        return self._open[-1]

    def over(self, *expected: Expected) -> None:
        for each in expected:
            each.end_due = self.now + LATEST_END_SECONDS + self.slack

    def check(self, now: float, raised: Sequence[Alert], resolved: Sequence[Alert]) -> None:
        self.now = now
        for alert in raised:
            expected = self._find(alert)
            if expected is None or expected.raised:
                self.wrong.append(f"{now:.0f} s: not expected: {dict(alert.labels)} {dict(alert.annotations)}")
            else:
                expected.raised = True
        for alert in resolved:
            expected = self._find(alert)
            if expected is not None and expected.end_due is None:
                self.wrong.append(f"{now:.0f} s: {dict(alert.labels)} is resolved and not over")
            elif expected is not None:
                expected.resolved = True
        for each in list(self._open):
            if not each.raised and now > each.due:
                self._fail(each, "did not come")
            elif each.end_due is not None and not each.resolved and now > each.end_due:
                self._fail(each, "does not end")
            elif each.resolved:
                self._open.remove(each)

    @property
    def awaited(self) -> int:
        """Return the expected alerts that are missing and not yet due."""
        return sum(not each.raised for each in self._open)

    def awaits(self, *rules: str) -> bool:
        """Return whether alerts of these rules are still expected, or their incidents are not over."""
        return any(each.rule in rules and (not each.raised or each.end_due is None) for each in self._open)

    def _find(self, alert: Alert) -> Expected | None:
        labels = dict(alert.labels)
        fitting = (e for e in self._open if e.rule == alert.rule and e.labels.items() <= labels.items())
        return next(fitting, None)

    def _fail(self, expected: Expected, how: str) -> None:
        self._open.remove(expected)
        self.wrong.append(f"{self.now:.0f} s: {expected.rule} {expected.labels} {how}")


Incident = Callable[[World, Oracle, str], Iterator[None]]


def last(seconds: float) -> Iterator[None]:
    for _ in range(round(seconds / TICK_SECONDS)):
        yield


def nearly_full(world: World, oracle: Oracle, uuid: str) -> Iterator[None]:
    """A program fills a device, and keeps it nearly full when another one ends."""
    hog = world.start("hog", uuid)
    world.allocate(hog, int(0.88 * SIZE_BYTES) - world.used_bytes(uuid))
    full = oracle.expect("device-nearly-full", 90, uuid=uuid)
    for _ in last(600):
        if (missing := int(0.82 * SIZE_BYTES) - world.used_bytes(uuid)) > 0:
            world.allocate(hog, missing)
        yield
    world.end(hog)
    oracle.over(full)


def out_of_memory(world: World, oracle: Oracle, uuid: str) -> Iterator[None]:
    resident = world.residents[uuid]
    assert world.allocate(resident, 2 * SIZE_BYTES) == 0
    oracle.over(oracle.expect("out-of-memory", 20, uuid=uuid, pid=str(resident.pid)))
    yield


def xid(world: World, oracle: Oracle, uuid: str) -> Iterator[None]:
    world.xids[uuid] += 1
    oracle.over(oracle.expect("xid-errors", 20, uuid=uuid))
    yield


def device_lost(world: World, oracle: Oracle, uuid: str) -> Iterator[None]:
    world.lost.add(uuid)
    lost = oracle.expect("device-lost", 40, uuid=uuid)
    yield from last(300)
    world.lost.discard(uuid)
    oracle.over(lost)


def driver_hangs(world: World, oracle: Oracle, uuid: str) -> Iterator[None]:
    world.state = replace(UP, up=False, responsive=False, reason="timeout", detail="a call doesn't return")
    alerts = [oracle.expect("driver-unresponsive", 20), oracle.expect("driver-down", 90)]
    yield from last(300)
    world.state = UP
    oracle.over(*alerts)


def driver_gone(world: World, oracle: Oracle, uuid: str) -> Iterator[None]:
    world.state = replace(UP, up=False, reason="driver_not_loaded", detail="unloaded")
    down = oracle.expect("driver-down", 90)
    yield from last(300)
    world.state = UP
    oracle.over(down)


def agent_silent(world: World, oracle: Oracle, uuid: str) -> Iterator[None]:
    program = world.start("quiet", uuid)
    world.allocate(program, GIB)
    yield from last(120)
    world.silent.add(program.pid)
    gone = oracle.expect("agent-gone", 90, uuid=uuid, pid=str(program.pid))
    yield from last(600)
    world.silent.discard(program.pid)
    oracle.over(gone)
    yield from last(60)
    world.end(program)


def orphan(world: World, oracle: Oracle, uuid: str) -> Iterator[None]:
    program = world.start("killed", uuid)
    world.allocate(program, 8 * GIB)
    yield from last(120)
    world.orphan(program)
    kept = oracle.expect("orphan-memory", 330, uuid=uuid)
    yield from last(1200)
    world.give_back(program)
    oracle.over(kept)


def disk_full(world: World, oracle: Oracle, uuid: str) -> Iterator[None]:
    world.disk_full = True
    refused = oracle.expect("store-not-writable", 40)
    yield from last(300)
    world.disk_full = False
    oracle.over(refused)


def receiver_down(world: World, oracle: Oracle, uuid: str) -> Iterator[None]:
    """Incidents during this one must be reported afterwards."""
    world.receiver_down = True
    yield from xid(world, oracle, uuid)
    yield from last(300)
    world.receiver_down = False


def clock_jumps(world: World, oracle: Oracle, uuid: str) -> Iterator[None]:
    """An incident without an expected alert."""
    for seconds in (10 * YEAR_SECONDS, -10 * YEAR_SECONDS, -1800.0, 3600.0):
        world.clock_error = seconds
        yield from last(300)
    world.clock_error = 0.0


def leak(world: World, oracle: Oracle, uuid: str) -> Iterator[None]:
    program: Process = world.start("leaks", uuid)
    world.allocate(program, 4 * GIB)
    yield from last(600)
    found = oracle.expect("leak", 5400, uuid=uuid, pid=str(program.pid))
    for _ in last(9000):
        world.allocate(program, 25 * MIB)
        yield
    world.end(program)
    oracle.over(found)


SHORT: tuple[Incident, ...] = (
    nearly_full,
    out_of_memory,
    xid,
    device_lost,
    driver_hangs,
    agent_silent,
    orphan,
    disk_full,
    receiver_down,
    clock_jumps,
    driver_gone,
)


def troubles(world: World, oracle: Oracle) -> Iterator[None]:
    """Run the incidents one after another, on one device and then on the other. Every ten hours a leak runs at the same
    time.
    """
    leaking: Iterator[None] | None = None
    leak_at = 3600.0
    for incident, uuid in zip(cycle(SHORT), cycle(UUIDS), strict=False):
        for _ in chain(last(PAUSE_SECONDS), incident(world, oracle, uuid)):
            if leaking is None and world.elapsed >= leak_at:
                leaking, leak_at = leak(world, oracle, UUIDS[1]), leak_at + 36_000
            if leaking is not None and next(leaking, StopIteration) is StopIteration:
                leaking = None
            yield
