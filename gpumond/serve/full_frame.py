"""A complete frame, as the API and its stream state it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from typing import Any

from gpumond import __version__, revision
from gpumond.diagnosis.detectors import idle_seconds
from gpumond.facts.errors import remedy
from gpumond.facts.frame import Frame, FullFrame, Line, ProcessHolding, StatedCondition, StatedFault
from gpumond.facts.program import ProcessKey
from gpumond.facts.snapshot import AgentReport, ProcessUsage, Snapshot
from gpumond.host.machine import MACHINE_NAME
from gpumond.tick.claims import unmapped_by_device
from gpumond.tick.conditions import conditions
from gpumond.tick.ledger import parts

REVISION = revision() or None
OF_PROCESS = {field.name for field in fields(ProcessHolding)} & {field.name for field in fields(ProcessUsage)}
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
        processes=tuple(holdings(frame)),
        faults=stated_faults(frame.snapshot),
        conditions=stated_conditions(frame.snapshot),
    )


def stated_faults(snapshot: Snapshot) -> tuple[StatedFault, ...]:
    return tuple(StatedFault(f.source, f.kind, f.device_uuid, f.detail, remedy(f.kind)) for f in snapshot.faults)


def stated_conditions(snapshot: Snapshot) -> tuple[StatedCondition, ...]:
    return tuple(
        StatedCondition(each.device_uuid, each.kind, remedy(each.kind), each.detail) for each in conditions(snapshot)
    )


def holdings(frame: Frame) -> Iterator[ProcessHolding]:
    """Yield every process of every device, and every agent's process that the driver does not list, with those that
    are suspended.
    """
    reports = frame.snapshot.reports_by_process
    lines: dict[tuple[str, ProcessKey | None], list[Line]] = {}
    for line in frame.ledger.lines:
        lines.setdefault((line.device_uuid, line.process), []).append(line)
    for device in frame.snapshot.devices:
        for key, process in device.processes_by_key.items():
            own = lines.pop((device.uuid, key), [])
            yield _holding(device.uuid, process, idle_seconds(device, process), reports.get(key), own, frame.snapshot)
    for each in frame.snapshot.suspensions:
        if each.confirmed:
            usage = replace(each.usage, used_bytes=0, state="suspended", utilization_ratio=None, idle_seconds=None)
            own = lines.pop((each.device_uuid, each.process), [])
            yield _holding(each.device_uuid, usage, None, reports.get(each.process), own, frame.snapshot)
    for (uuid, unlisted), own in lines.items():
        if unlisted is not None:
            process = ProcessUsage(pid=unlisted.pid, start_ticks=unlisted.start_ticks, used_bytes=None)
            yield _holding(uuid, process, None, reports.get(unlisted), own, frame.snapshot)


def _holding(
    device_uuid: str,
    process: ProcessUsage,
    idle: float | None,
    report: AgentReport | None,
    lines: Iterable[Line],
    snapshot: Snapshot,
) -> ProcessHolding:
    shares: Counter[str] = Counter()
    for line in lines:
        shares[line.share] += line.used_bytes
    stated: dict[str, Any] = {name: getattr(process, name) for name in OF_PROCESS}
    stated |= {f"{share}_bytes": shares.get(share) for share in ("live", "cached", "stranded", "overhead", "opaque")}
    stated["idle_seconds"] = idle
    return ProcessHolding(
        device_uuid=device_uuid,
        **stated,
        workload=report.workload if report else "",
        overhead_parts=parts(snapshot.overheads_by_process.get((device_uuid, process.key)), shares.get("overhead")),
        unmapped_bytes=unmapped_by_device(report.pools).get(device_uuid) if report else None,
        limit_bytes=snapshot.limits.get((device_uuid, process.key)),
        quota=snapshot.quotas_by_process.get(process.key),
        reserve_shortage_bytes=snapshot.reserve_shortages.get((device_uuid, process.key)),
    )
