"""A flush: what is requested, and what it answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpumond.facts.engines import EngineReading
from gpumond.facts.errors import LIST_PROGRAMS_HINT, NoSuchTarget, did_you_mean
from gpumond.facts.pools import DEFAULT_STEPS, FlushOutcome, Receipt
from gpumond.facts.program import ProcessKey
from gpumond.facts.snapshot import AgentReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Processes of a flush: exactly one of the first four; with ``uid`` only programs of that user.

    ``start_ticks``: with ``pid``, only the process that started then.
    """

    pid: int | None = None
    device: str | None = None
    workload: str | None = None
    all: bool = False
    uid: int | None = None
    start_ticks: int | None = None

    def matches(self, report: AgentReport) -> bool:
        if self.uid is not None and report.uid != self.uid:
            return False
        if self.pid is not None:
            return report.pid == self.pid and self.start_ticks in (None, report.start_ticks)
        if self.device is not None:
            return any(pool.device_uuid == self.device for pool in report.pools)
        if self.workload is not None:
            return report.workload == self.workload
        return self.all

    def matches_engine(
        self, engine: EngineReading, workloads: Mapping[ProcessKey, str], devices: Mapping[ProcessKey, set[str]]
    ) -> bool:
        """Return True for a serving engine of the user that the target names: by its name, or by its processes.

        ``workloads``: those of the agents. ``devices``: those on which the driver lists each process.
        """
        keys = [process.key for process in engine.processes]
        if self.uid is not None and engine.uid != self.uid:
            return False
        if self.pid is not None:
            return any(key.pid == self.pid and self.start_ticks in (None, key.start_ticks) for key in keys)
        if self.device is not None:
            return any(self.device in devices.get(key, ()) for key in keys)
        if self.workload is not None:
            return self.workload == engine.name or any(workloads.get(key) == self.workload for key in keys)
        return self.all

    def __str__(self) -> str:
        names = (("pid", self.pid), ("device", self.device), ("workload", self.workload))
        user = "" if self.uid is None else f" (uid {self.uid})"
        return next((f"{name} {value}" for name, value in names if value is not None), "all") + user


MAX_REASON_LENGTH = 200
"""Characters of an operation's reason, and of its requester."""
OPERATION_ID = r"^[A-Za-z0-9._-]{1,64}$"


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation on several machines, of which this request is a part: its id, which is the same on all of them, its
    reason, and who requests it. The caller states them, and the audit records them.
    """

    id: str
    reason: str = ""
    by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushRequest:
    """``timeout_seconds`` is for each program. ``force`` overrides the cooldown. ``by_rule``: requested by a rule's
    action, or by a request for memory of the program ``requested_for``.

    ``plan``: the id of the plan that this flush executes. ``wake``: undo the last release of the step ``engine``.
    """

    target: Target
    steps: tuple[str, ...] = DEFAULT_STEPS
    min_reclaimable_bytes: int = 0
    dry_run: bool = False
    timeout_seconds: float = 30.0
    force: bool = False
    by_rule: bool = False
    requested_for: str = ""
    plan: str | None = None
    wake: bool = False
    operation: Operation | None = None


@dataclass(frozen=True, slots=True)
class FlushResponse:
    id: str
    receipts: tuple[Receipt, ...]
    released_bytes: int


def no_agent_error(target: Target, reports: Iterable[AgentReport]) -> NoSuchTarget:
    """Return the error about a target without a program; it names the workload with the most similar name."""
    workloads = (report.workload for report in reports if target.uid in (None, report.uid))
    hint = did_you_mean(target.workload, workloads) if target.workload else ""
    return NoSuchTarget(f"no program with an agent matches {target}{hint or LIST_PROGRAMS_HINT}")


def empty_receipt(
    report: AgentReport, outcome: FlushOutcome, reason: str, requested_by: str, started_at: float
) -> Receipt:
    """Make the receipt of a flush that no pool has answered."""
    return receipt_without_bytes(report.key, report.workload, outcome, reason, requested_by, started_at)


def receipt_without_bytes(
    process: ProcessKey, workload: str, outcome: FlushOutcome, reason: str, requested_by: str, started_at: float
) -> Receipt:
    return Receipt(
        pid=process.pid,
        start_ticks=process.start_ticks,
        workload=workload,
        device_uuid=None,
        allocator=None,
        outcome=outcome,
        reason=reason,
        expected=None,
        released_bytes=0,
        driver_released_bytes=None,
        before=None,
        after=None,
        steps=(),
        raced=False,
        requested_by=requested_by,
        started_at=started_at,
        duration_seconds=0.0,
    )


def labels_match_program(labels: Mapping[str, str], report: AgentReport) -> bool:
    """Return True if the labels of an alert that name a program name this one."""
    return all(labels[name] == str(getattr(report, name)) for name in PROGRAM_LABELS if name in labels)


def reclaimable_bytes(labels: Mapping[str, str], report: AgentReport) -> int:
    """Return the memory that a flush of the program would release on the device that the labels name, or on all."""
    uuid = labels.get("uuid")
    return sum(pool.reclaimable.likely for pool in report.pools if uuid in (None, pool.device_uuid))


PROGRAM_LABELS = ("pid", "start_ticks", "workload", "uid")
"""Labels of alerts that are attributes of a program's report."""
