"""From what was seen to what every reader gets. Pure; time is an argument.

``observe`` makes the Snapshot of one tick, ``advance`` folds it into the Frame: facts, ledger, alerts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpumond.attribution import attribute
from gpumond.model import (
    MISSED_LIMIT,
    STARTING,
    AgentReport,
    Alert,
    DeviceReading,
    Fault,
    Frame,
    PoolUsage,
    Reading,
    Snapshot,
    SourceState,
)
from gpumond.resume import Awaited, hold
from gpumond.rules import Activities, Rule, step
from gpumond.rules.recent import Recent, remember
from gpumond.rules.subjects import hidden, subjects


@dataclass(frozen=True, slots=True)
class Memory:
    """What one tick leaves for the next."""

    activities: Mapping[str, Activities] = field(default_factory=dict)
    """By the name of the rule."""
    recent: Recent = field(default_factory=Recent)
    awaited: Awaited = frozenset()


@dataclass(frozen=True, slots=True)
class Tick:
    memory: Memory
    frame: Frame
    raised: tuple[Alert, ...] = ()
    resolved: tuple[Alert, ...] = ()


def observe(
    previous: Snapshot | None,
    source: SourceState,
    reading: Reading | None,
    reports: Sequence[AgentReport],
    taken_at: float,
    elapsed_seconds: float,
    store_writable: bool | None = None,
    faults: Sequence[Fault] = (),
) -> Snapshot:
    """The facts of one tick. ``reading`` is None if none came in time.

    A device that did not answer keeps the values of its last reading for two ticks and is then
    only known by name, until it answers again or the source no longer lists it.
    """
    seen = [*(reading.faults if reading else ()), *faults]
    known = previous.devices if previous else ()
    devices = tuple(_devices(known, reading))
    reports = tuple(_possible(reports, devices, seen))
    if not source.up and source.reason != STARTING:
        seen.append(Fault(source.name, source.reason, None, source.detail))
    seq = previous.seq + 1 if previous else 1
    xids = reading.xids if reading else previous.xids if previous else ()
    return Snapshot(seq, taken_at, elapsed_seconds, source, devices, reports, tuple(seen), xids, store_writable)


def advance(memory: Memory, rules: Sequence[Rule], snapshot: Snapshot) -> Tick:
    """The next frame, and which alerts began or ceased to fire with it."""
    ledger = attribute(snapshot)
    recent = remember(memory.recent, snapshot)
    unseen = hidden(snapshot, recent)
    scopes = {scope: tuple(subjects(scope, snapshot, ledger, recent)) for scope in {rule.scope for rule in rules}}
    now, elapsed = snapshot.taken_at, snapshot.elapsed_seconds
    activities: Mapping[str, Activities] = {
        rule.name: step(rule, scopes[rule.scope], memory.activities.get(rule.name, {}), unseen, now, elapsed)
        for rule in rules
    }
    awaited = memory.awaited
    if awaited:
        seen = {rule.name: frozenset(subject.labels for subject in scopes[rule.scope]) for rule in rules}
        activities, awaited = hold(awaited, memory.activities, activities, seen, elapsed)
    alerts = tuple(activity.alert for active in activities.values() for activity in active.values())
    return Tick(
        Memory(activities, recent, awaited),
        Frame(snapshot, ledger, (), alerts),
        raised=tuple(_began(memory.activities, activities)),
        resolved=tuple(_began(activities, memory.activities)),
    )


def _began(before: Mapping[str, Activities], after: Mapping[str, Activities]) -> Iterator[Alert]:
    """The alerts that fire in ``after`` and did not in ``before``."""
    for rule, active in after.items():
        known = before.get(rule, {})
        for labels, activity in active.items():
            if activity.alert.phase == "firing":
                other = known.get(labels)
                if other is None or other.alert.phase != "firing" or other.alert.labels != activity.alert.labels:
                    yield activity.alert


def _devices(known: Sequence[DeviceReading], reading: Reading | None) -> Iterator[DeviceReading]:
    fresh = {device.uuid: device for device in reading.devices} if reading else {}
    for device in known:
        if device.uuid in fresh:
            yield fresh.pop(device.uuid)
        elif reading is None or _at_fault(device, reading.faults):
            missed, up = device.missed + 1, device.up and reading is None
            yield replace(device, missed=missed, up=up) if missed < MISSED_LIMIT else _unknown(device, missed)
    yield from fresh.values()


def _at_fault(device: DeviceReading, faults: Iterable[Fault]) -> bool:
    return any(fault.device_uuid in (None, device.uuid, device.parent_uuid) for fault in faults)


def _unknown(device: DeviceReading, missed: int) -> DeviceReading:
    return DeviceReading(
        device.uuid,
        device.index,
        device.name,
        device.vendor,
        device.pci_bus_id,
        device.parent_uuid,
        unified=device.unified,
        missed=missed,
        up=False,
    )


def _possible(
    reports: Iterable[AgentReport], devices: Iterable[DeviceReading], faults: list[Fault]
) -> Iterator[AgentReport]:
    """Reports without the pools that claim more than their device has; each of those is a fault."""
    sizes = {device.uuid: device.size_bytes for device in devices}

    def fits(pool: PoolUsage) -> bool:
        size = sizes.get(pool.device_uuid)
        return size is None or max(pool.live_bytes, pool.held_bytes, pool.reclaimable.high) <= size

    for report in reports:
        pools = tuple(pool for pool in report.pools if fits(pool))
        if len(pools) < len(report.pools):
            detail = f"pid {report.pid} claims more memory than its device has"
            faults.append(Fault("agent", "impossible_value", None, detail))
            report = replace(report, pools=pools)
        yield report
