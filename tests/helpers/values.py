"""Factories of model values for tests. Every field has a default, so a test states only the fields it concerns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gpumond.diagnosis.diagnosis import Diagnosis, diagnose
from gpumond.diagnosis.sentences import with_retainers
from gpumond.facts.alerts import AlertStates, Rule
from gpumond.facts.errors import FaultKind, ReturnCode
from gpumond.facts.frame import Alert, Frame, Verdict
from gpumond.facts.pools import PoolUsage, Reclaimable
from gpumond.facts.quota import EffectiveQuota
from gpumond.facts.snapshot import AgentReport, DeviceReading, Fault, ProcessQuota, ProcessUsage, Snapshot, SourceState
from gpumond.facts.suspension import SuspendedMemory, SuspendedProgram
from gpumond.facts.units import GIB as GIB
from gpumond.features.rules.evaluation import AwaitedAlerts, RuleState, evaluate as evaluate_rules
from gpumond.quantities.window import RuleWindow, next_window
from gpumond.tick.ledger import make_ledger


def make_process(pid: int = 10, used_bytes: int | None = GIB, **fields: Any) -> ProcessUsage:
    return ProcessUsage(**{"pid": pid, "start_ticks": 100, "used_bytes": used_bytes, "kinds": ("compute",)} | fields)


def make_device(uuid: str = "GPU-a", **fields: Any) -> DeviceReading:
    defaults: dict[str, Any] = {"index": 0, "size_bytes": 80 * GIB, "used_bytes": 0, "processes": ()}
    return DeviceReading(uuid=uuid, **defaults | fields)


def make_pool(
    device_uuid: str = "GPU-a", live: int = 0, cached: int = 0, stranded: int = 0, **fields: Any
) -> PoolUsage:
    defaults: dict[str, Any] = {
        "allocator": "torch",
        "live_bytes": live,
        "held_bytes": live + cached + stranded,
        "reclaimable": Reclaimable(cached, cached, cached),
        "stranded_bytes": stranded,
    }
    return PoolUsage(device_uuid=device_uuid, **defaults | fields)


def make_report(pid: int = 10, pools: tuple[PoolUsage, ...] = (), **fields: Any) -> AgentReport:
    defaults: dict[str, Any] = {
        "start_ticks": 100,
        "uid": 1000,
        "workload": "train",
        "age_seconds": 0.1,
        "frameworks": ("torch 2.13.0",),
        "flush_policy": "allow",
    }
    return AgentReport(pid=pid, pools=pools, **defaults | fields)


def make_suspended(pid: int = 10, size: int = GIB, **fields: Any) -> SuspendedProgram:
    defaults: dict[str, Any] = {
        "id": f"{pid}-100",
        "start_ticks": 100,
        "uid": 1000,
        "workload": "train",
        "state": "suspended",
        "since": 1.0,
        "memory": (SuspendedMemory("GPU-a", 0, size),),
    }
    return SuspendedProgram(pid=pid, **defaults | fields)


def make_quotas(
    report: AgentReport, soft: tuple[int, str], limit: tuple[int, str], reserve: tuple[int, str]
) -> tuple[ProcessQuota, ...]:
    """Return the quotas of a program: bytes, and name of the quota."""
    quota = EffectiveQuota(
        soft_limit_bytes=soft[0],
        soft_limit_quota=soft[1],
        limit_bytes=limit[0],
        limit_quota=limit[1],
        reserve_bytes=reserve[0],
        reserve_quota=reserve[1],
    )
    return (ProcessQuota(pid=report.pid, start_ticks=report.start_ticks, quota=quota),)


def make_snapshot(*devices: DeviceReading, **fields: Any) -> Snapshot:
    defaults: dict[str, Any] = {
        "seq": 1,
        "taken_at": 1_000_000.0,
        "elapsed_seconds": 1.0,
        "source": SourceState(name="sim", up=True, responsive=True),
    }
    return Snapshot(devices=devices, **defaults | fields)


def make_fault(
    device_uuid: str | None = None, kind: FaultKind | ReturnCode = "gpu_is_lost", source: str = "nvml"
) -> Fault:
    return Fault(source, kind, device_uuid, "for a test")


@dataclass(frozen=True, slots=True)
class TickState:
    """State that `advance` passes from one tick to the next."""

    alert_states: Mapping[str, AlertStates] = field(default_factory=dict)
    recent: RuleWindow = field(default_factory=RuleWindow)
    awaited: AwaitedAlerts = frozenset()
    diagnosis: Diagnosis = field(default_factory=Diagnosis, compare=False)


@dataclass(frozen=True, slots=True)
class Advanced:
    memory: TickState
    frame: Frame
    raised: tuple[Alert, ...] = ()
    resolved: tuple[Alert, ...] = ()


def advance(state: TickState, rules: Sequence[Rule], snapshot: Snapshot) -> Advanced:
    """Conclude one frame from a snapshot, as the daemon does with the feature rules alone."""
    diagnosis = diagnose(state.diagnosis, snapshot)
    verdicts = with_retainers(diagnosis.verdicts, snapshot)
    return evaluate(replace(state, diagnosis=diagnosis), rules, snapshot, verdicts)


def evaluate(state: TickState, rules: Sequence[Rule], snapshot: Snapshot, verdicts: Sequence[Verdict]) -> Advanced:
    """Conclude one frame from a snapshot and known verdicts."""
    window = next_window(state.recent, snapshot)
    frame = Frame(snapshot, make_ledger(snapshot), tuple(verdicts))
    rule_state, evaluated = evaluate_rules(RuleState(state.alert_states, state.awaited), rules, frame, window)
    memory = TickState(rule_state.alert_states, window, rule_state.awaited, state.diagnosis)
    return Advanced(memory, replace(frame, alerts=evaluated.alerts), evaluated.raised, evaluated.resolved)
