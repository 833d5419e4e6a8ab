"""A complete frame, as the API and its stream state it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

from gpumond import __version__, revision
from gpumond.diagnosis.detectors import idle_seconds
from gpumond.facts.errors import remedy
from gpumond.facts.frame import ConditionWithRemedy, FaultWithRemedy, Frame, FullFrame, ProcessHolding
from gpumond.facts.program import ProcessKey
from gpumond.facts.snapshot import AgentReport, ProcessUsage, Snapshot
from gpumond.host.machine import MACHINE_NAME, started_at
from gpumond.tick.claims import unmapped_bytes_by_device
from gpumond.tick.ledger import overhead_parts
from gpumond.tick.reading_conditions import conditions

REVISION = revision() or None
PROCESS_FIELDS = sorted(
    {field.name for field in fields(ProcessHolding)} & {field.name for field in fields(ProcessUsage)}
)
"""The fields that are the driver's values."""


def full_frame(frame: Frame) -> FullFrame:
    return FullFrame(
        version=__version__,
        revision=REVISION,
        host=MACHINE_NAME,
        snapshot=frame.snapshot,
        ledger=frame.ledger,
        verdicts=frame.verdicts,
        alerts=frame.alerts,
        silences=frame.silences,
        queue=frame.queue,
        grants=frame.grants,
        processes=tuple(holdings(frame)),
        faults=faults_with_remedies(frame.snapshot),
        conditions=stated_conditions(frame.snapshot),
    )


def faults_with_remedies(snapshot: Snapshot) -> tuple[FaultWithRemedy, ...]:
    return tuple(
        FaultWithRemedy(fault.source, fault.kind, fault.device_uuid, fault.detail, remedy(fault.kind))
        for fault in snapshot.faults
    )


def stated_conditions(snapshot: Snapshot) -> tuple[ConditionWithRemedy, ...]:
    return tuple(
        ConditionWithRemedy(each.device_uuid, each.kind, remedy(each.kind), each.detail)
        for each in conditions(snapshot)
    )


def holdings(frame: Frame) -> Iterator[ProcessHolding]:
    """Yield every process of every device, every agent's process that the driver does not list, and suspended ones."""
    snapshot, reports = frame.snapshot, frame.snapshot.reports_by_process
    sums: dict[tuple[str, tuple[int | None, int | None]], dict[str, int]] = {}
    for line in frame.ledger.lines:
        shares = sums.setdefault((line.device_uuid, (line.pid, line.start_ticks)), {})  # equal to a ProcessKey
        shares[line.share] = shares.get(line.share, 0) + line.used_bytes
    for device in snapshot.devices:
        for key, process in device.processes_by_key.items():
            shares = sums.pop((device.uuid, key), {})
            yield _holding(device.uuid, key, process, idle_seconds(device, process), reports.get(key), shares, snapshot)
    for each in snapshot.suspensions:
        if each.confirmed:
            usage = replace(each.usage, used_bytes=0, state="suspended", utilization_ratio=None, idle_seconds=None)
            shares = sums.pop((each.device_uuid, each.process), {})
            yield _holding(each.device_uuid, usage.key, usage, None, reports.get(each.process), shares, snapshot)
    for (uuid, (pid, start_ticks)), shares in sums.items():
        if pid is not None:
            process = ProcessUsage(pid=pid, start_ticks=start_ticks, used_bytes=None)
            yield _holding(uuid, process.key, process, None, reports.get(process.key), shares, snapshot)


def _holding(
    device_uuid: str,
    key: ProcessKey,
    process: ProcessUsage,
    idle: float | None,
    report: AgentReport | None,
    shares: Mapping[str, int],
    snapshot: Snapshot,
) -> ProcessHolding:
    values: dict[str, Any] = {name: getattr(process, name) for name in PROCESS_FIELDS} | {"idle_seconds": idle}
    return ProcessHolding(
        device_uuid=device_uuid,
        started_at=started_at(key),
        **values,
        workload=report.workload if report else "",
        live_bytes=shares.get("live"),
        cached_bytes=shares.get("cached"),
        stranded_bytes=shares.get("stranded"),
        overhead_bytes=shares.get("overhead"),
        opaque_bytes=shares.get("opaque"),
        overhead_parts=overhead_parts(snapshot.overheads_by_process.get((device_uuid, key)), shares.get("overhead")),
        unmapped_bytes=unmapped_bytes_by_device(report.pools).get(device_uuid) if report else None,
        limit_bytes=snapshot.limits.get((device_uuid, key)),
        quota=snapshot.quotas_by_process.get(key),
        reserve_shortage_bytes=snapshot.reserve_shortages.get((device_uuid, key)),
        flush_policy=report.flush_policy if report else None,
        suspendable=bool(report and report.suspendable),
    )
