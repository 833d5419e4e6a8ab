"""Permanent limits of a reading that are not faults: they change what the numbers mean. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from gpumond.facts.errors import CONDITION_REMEDIES
from gpumond.facts.snapshot import MAX_MISSED_READINGS, AgentReport, DeviceReading, ExcessClaim, Snapshot, Suspension
from gpumond.facts.units import size_text
from gpumond.tick.claims import unmapped_bytes_by_device

DEVICE_CONDITIONS = tuple(
    kind for kind in CONDITION_REMEDIES if kind not in ("private_pid_namespace", "agent_pid_unknown")
)
MAX_SHOWN_AGENTS = 3
"""Maximum number of agents without a pid that the condition names; it counts the others."""


class Condition(NamedTuple):
    """A limit of one device; ``device_uuid`` is None for the machine. ``detail`` states process and reason, if any."""

    device_uuid: str | None
    kind: str
    detail: str = ""


def conditions(snapshot: Snapshot) -> Iterator[Condition]:
    if snapshot.private_pid_namespace and any(device.vendor != "sim" for device in snapshot.devices):
        yield Condition(None, "private_pid_namespace")
    without_pid = [report for report in snapshot.reports if not report.has_pid]
    if without_pid:
        yield Condition(None, "agent_pid_unknown", _agents_text(without_pid))
    for device in snapshot.devices:
        for kind in device_conditions(device):
            partition_bytes = device.partition_bytes if kind == "memory_partition" else None
            yield Condition(
                device.uuid,
                kind,
                "" if partition_bytes is None else f"the daemon itself could use {size_text(partition_bytes)}",
            )
    suspended_by_gpumond = {each.key for each in snapshot.suspended_programs}
    for each in snapshot.suspensions:
        if each.confirmed and each.process not in suspended_by_gpumond:
            yield Condition(each.device_uuid, "suspended", _suspension_text(snapshot, each))
    for report in snapshot.reports:
        for uuid, size in _managed_bytes_by_device(report).items():
            allocated = f"{size_text(size)} is allocated; the part on the GPU is unknown"
            detail = f"{_process_text(report.pid, report.workload)}: {allocated}"
            yield Condition(uuid, "managed_memory", detail)
        yield from _live_unknown_conditions(report, snapshot)
    for excess in snapshot.excesses:
        if excess.unmapped_bytes or excess.allocator:
            yield _excess_condition(excess)


def _live_unknown_conditions(report: AgentReport, snapshot: Snapshot) -> Iterator[Condition]:
    """Yield a condition for each pool with unknown live bytes, and for a program with RMM that reports no pool."""
    process = _process_text(report.pid, report.workload)
    for pool in report.pools:
        if pool.live_bytes is None and pool.inside is None:
            size = size_text(pool.held_bytes) if pool.held_known else "an unknown amount of memory"
            detail = f"{process}: {size} in {pool.allocator} can't be split into live and free bytes"
            yield Condition(pool.device_uuid, "live_unknown", detail)
    if not report.pools and any(framework.startswith("rmm ") for framework in report.frameworks):
        for device in snapshot.devices:
            if report.key in device.processes_by_key:
                yield Condition(device.uuid, "live_unknown", f"{process}: RMM is loaded, but counts no bytes")


def _process_text(pid: int, workload: str) -> str:
    return f"pid {pid} ({workload})" if workload else f"pid {pid}"


def _agents_text(reports: Sequence[AgentReport]) -> str:
    names = [
        f"{each.workload or 'unnamed'} (uid {each.uid}, connection {each.pid})" for each in reports[:MAX_SHOWN_AGENTS]
    ]
    others = len(reports) - len(names)
    return ", ".join([*names, f"{others} more"] if others else names)


def _managed_bytes_by_device(report: AgentReport) -> Mapping[str, int]:
    """Return the bytes of managed memory that a program holds, by the device of its pools."""
    sums: dict[str, int] = {}
    for pool in report.pools:
        if pool.managed and pool.held_bytes:
            sums[pool.device_uuid] = sums.get(pool.device_uuid, 0) + pool.held_bytes
    return sums


def _suspension_text(snapshot: Snapshot, suspension: Suspension) -> str:
    report = snapshot.reports_by_process.get(suspension.process)
    name = (report.workload if report else "") or suspension.usage.comm or "unnamed"
    unmapped = unmapped_bytes_by_device(report.pools).get(suspension.device_uuid, 0) if report else 0
    counted = size_text(suspension.usage.used_bytes or 0)
    process = f"pid {suspension.process.pid} ({name})"
    return f"{process}: {size_text(unmapped)} in its allocators; the driver counted {counted} before"


def _excess_condition(excess: ExcessClaim) -> Condition:
    process = _process_text(excess.pid, excess.workload)
    claimed, limit = size_text(excess.claimed_bytes), size_text(excess.limit_bytes)
    if excess.allocator:
        detail = f"{process}: {excess.allocator} claims {claimed}, but the GPU has {limit}: counted as {limit}"
        return Condition(excess.device_uuid, "pool_exceeds_device", detail)
    detail = (
        f"{process}: the allocators claim {claimed}, but the driver counts {limit}: {size_text(excess.unmapped_bytes)} "
        "is estimated to be unmapped"
    )
    return Condition(excess.device_uuid, "unmapped_estimated", detail)


def device_conditions(device: DeviceReading) -> Iterator[str]:
    if device.missed_readings >= MAX_MISSED_READINGS:
        return  # all values are unknown
    if device.unified:
        yield "unified_memory"
    if device.sensors.addressing_mode == "ats":
        yield "coherent_memory"
    if device.sensors.virtualization_mode in ("vgpu", "host_vgpu", "host_vsga"):
        yield device.sensors.virtualization_mode
    if device.processes is None:
        yield "no_process_list"
    elif device.has_mps_server:
        yield "mps"
    if device.partition_bytes is not None:
        yield "memory_partition"
        return
    is_counted = device.used_bytes is not None and not device.unified
    if device.vendor == "nvidia" and is_counted and device.reserved_bytes is None and device.parent_uuid is None:
        yield "reserved_in_used"
