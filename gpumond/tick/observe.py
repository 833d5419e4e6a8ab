"""One tick without I/O: from readings and reports to the Frame. Time is an argument.

``observe`` makes the Snapshot of one tick; ``advance`` derives the Frame from it: facts, ledger, alerts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gpumond.diagnosis.diagnosis import Diagnosis, diagnose
from gpumond.diagnosis.idle import with_idle_times
from gpumond.facts.alerts import Activities, ended, same_process
from gpumond.facts.engines import EngineReading
from gpumond.facts.frame import Alert, Frame, Verdict
from gpumond.facts.quota import WITHOUT_QUOTAS, QuotaTable
from gpumond.facts.rule import Rule, Scope
from gpumond.facts.snapshot import (
    MISSED_LIMIT,
    STARTING,
    AgentReport,
    DeviceReading,
    Fault,
    ProgramEnd,
    Reading,
    Snapshot,
    SourceState,
)
from gpumond.features.quotas.quotas import assign_quotas
from gpumond.features.rules.evaluation import located, step
from gpumond.features.rules.restore import Awaited, hold
from gpumond.quantities import RuleContext, departure, hidden, subjects
from gpumond.quantities.subjects import Subjects
from gpumond.quantities.verdicts import NOTHING, active_verdicts
from gpumond.quantities.window import RuleWindow, remember
from gpumond.tick.claims import check_claims, complete_lists
from gpumond.tick.ledger import attribute, following
from gpumond.tick.retainers import with_retainers
from gpumond.tick.suspensions import suspending


@dataclass(frozen=True, slots=True)
class EngineState:
    """State that one tick passes to the next."""

    activities: Mapping[str, Activities] = field(default_factory=dict)
    """Activities by the name of the rule."""
    recent: RuleWindow = field(default_factory=RuleWindow)
    awaited: Awaited = frozenset()
    diagnosis: Diagnosis = field(default_factory=Diagnosis, compare=False)
    """Changed in place: a second tick from the same state gets no new verdicts."""


@dataclass(frozen=True, slots=True)
class Tick:
    memory: EngineState
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
    private_pid_namespace: bool | None = None,
    ends: Sequence[ProgramEnd] = (),
    silent: Sequence[AgentReport] = (),
    engines: Sequence[EngineReading] = (),
    uptime_seconds: float | None = None,
    quotas: QuotaTable = WITHOUT_QUOTAS,
    person_of: Callable[[int], int] = int,
) -> Snapshot:
    """Make the facts of one tick. ``reading`` is None if none arrived in time.

    ``silent``: the last reports of silent agents, of which only those of suspended processes are used. ``person_of``:
    the person who owns a uid.

    A device that did not answer keeps the values of its last reading for two ticks. After that all its values are
    unknown until it answers again or the source no longer lists it.
    """
    all_faults = [*(reading.faults if reading else ()), *faults]
    known = previous.devices if previous else ()
    seconds = elapsed_seconds - previous.elapsed_seconds if previous else 0.0
    devices: list[DeviceReading] = []
    for device in _devices(known, reading, seconds):
        devices.append(device)
    complete = complete_lists(devices, all_faults, private_pid_namespace)
    reports, suspensions = suspending(
        reports, silent, devices, all_faults, private_pid_namespace, previous, elapsed_seconds
    )
    reports, excesses = check_claims(reports, devices, complete, previous, all_faults, person_of)
    if not source.up and source.reason and source.reason != STARTING:
        all_faults.append(Fault(source.name, source.reason, None, source.detail))
    seq = previous.seq + 1 if previous else 1
    xids = reading.xids if reading else previous.xids if previous else ()
    return Snapshot(
        seq=seq,
        taken_at=taken_at,
        elapsed_seconds=elapsed_seconds,
        source=source,
        devices=tuple(devices),
        reports=reports,
        faults=tuple(all_faults),
        xids=xids,
        store_writable=store_writable,
        private_pid_namespace=private_pid_namespace,
        ends=tuple(ends),
        excesses=excesses,
        engines=tuple(engines),
        uptime_seconds=uptime_seconds,
        quotas=assign_quotas(quotas, devices, reports),
        suspensions=suspensions,
        overheads=(tuple(following(devices, reports, suspensions, previous, elapsed_seconds))),
    )


def advance(memory: EngineState, rules: Sequence[Rule], snapshot: Snapshot) -> Tick:
    """Make the next frame, and the alerts that began or ceased to fire. ``memory`` must not be used meanwhile."""
    diagnosis = diagnose(memory.diagnosis, snapshot)
    verdicts = with_retainers(diagnosis.verdicts, snapshot)
    return evaluate(replace(memory, diagnosis=diagnosis), rules, snapshot, verdicts)


def evaluate(memory: EngineState, rules: Sequence[Rule], snapshot: Snapshot, verdicts: Sequence[Verdict]) -> Tick:
    """Make the next frame from known verdicts."""
    ledger = attribute(snapshot)
    recent = remember(memory.recent, snapshot)
    unseen = hidden(snapshot, recent)
    facts = RuleContext(snapshot, ledger, recent, active_verdicts(verdicts))
    scopes: dict[Scope, Subjects[Any]] = {}
    for scope in {rule.scope for rule in rules}:
        scopes[scope] = subjects(scope, facts)
    now, elapsed = snapshot.taken_at, snapshot.elapsed_seconds
    stepped: dict[str, Activities] = {}
    for rule in rules:
        before = memory.activities.get(rule.name, {})
        rows, concerned = scopes[rule.scope], located(rule, snapshot.devices)
        stepped[rule.name] = step(concerned, rows, before, unseen, now, elapsed)
    activities: Mapping[str, Activities] = stepped
    awaited = memory.awaited
    if awaited:
        present = {scope: {each.labels(row): each.process(row) for row in each.rows} for scope, each in scopes.items()}
        subjects_by_rule = {rule.name: present[rule.scope] for rule in rules}
        on_verdicts = frozenset(rule.name for rule in rules if rule.value in NOTHING)
        activities, awaited = hold(awaited, memory.activities, activities, subjects_by_rule, on_verdicts, elapsed)
    alerts = tuple(activity.alert for active in activities.values() for activity in active.values())
    raised = tuple(_began(memory.activities, activities))
    resolved = tuple(_resolved(_began(activities, memory.activities), rules, snapshot))
    state = EngineState(activities, recent, awaited, memory.diagnosis)
    return Tick(state, Frame(snapshot, ledger, tuple(verdicts), alerts), raised, resolved)


def _began(before: Mapping[str, Activities], after: Mapping[str, Activities]) -> Iterator[Alert]:
    """Yield the alerts that fire in ``after`` and not in ``before``."""
    for rule, active in after.items():
        known = before.get(rule, {})
        for labels, activity in active.items():
            alert = activity.alert
            if alert.phase == "firing":
                other = known.get(labels)
                if (
                    other is None
                    or other.alert.phase != "firing"
                    or other.alert.labels != alert.labels
                    or not same_process(other.process, activity.process)
                ):
                    yield alert


def _resolved(alerts: Iterable[Alert], rules: Sequence[Rule], snapshot: Snapshot) -> Iterator[Alert]:
    """Yield the alerts as resolved. The text of an alert whose subject has ended states this."""
    scopes: dict[str, Scope] = {rule.name: rule.scope for rule in rules}
    for alert in alerts:
        scope = scopes.get(alert.rule)
        reason = departure(scope, alert, snapshot) if scope is not None else ""
        yield ended(alert, snapshot.taken_at, reason)


def _devices(known: Sequence[DeviceReading], reading: Reading | None, seconds: float) -> Iterator[DeviceReading]:
    fresh = {device.uuid: device for device in reading.devices} if reading else {}
    for device in known:
        if device.uuid in fresh:
            yield with_idle_times(fresh.pop(device.uuid), device, seconds)
        elif reading is None or _at_fault(device, reading.faults):
            missed, up = device.missed + 1, device.up and reading is None
            yield replace(device, missed=missed, up=up) if missed < MISSED_LIMIT else _unknown(device, missed)
    yield from (with_idle_times(device, None, seconds) for device in fresh.values())


def _at_fault(device: DeviceReading, faults: Iterable[Fault]) -> bool:
    """Return True if a fault explains that the device is missing. A fault without a device affects its whole source."""
    return any(
        fault.device_uuid in (device.uuid, device.parent_uuid)
        if fault.device_uuid is not None
        else fault.source == device.source or not device.source
        for fault in faults
    )


def _unknown(device: DeviceReading, missed: int) -> DeviceReading:
    return DeviceReading(
        uuid=device.uuid,
        index=device.index,
        name=device.name,
        vendor=device.vendor,
        pci_bus_id=device.pci_bus_id,
        parent_uuid=device.parent_uuid,
        unified=device.unified,
        missed=missed,
        up=False,
        source=device.source,
    )
