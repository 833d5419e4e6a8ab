"""Permanent limits of a reading that are not faults: they change what the numbers mean. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gpumond.model.remedies import CONDITIONS
from gpumond.model.snapshot import MISSED_LIMIT, AgentReport, DeviceReading, Excess, Snapshot
from gpumond.model.units import human

OF_DEVICES = tuple(kind for kind in CONDITIONS if kind not in ("private_pid_namespace", "agent_pid_unknown"))
SHOWN_AGENTS = 3
"""Agents without a pid that the condition names; it counts the others."""


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
        yield Condition(None, "agent_pid_unknown", _names(without_pid))
    for device in snapshot.devices:
        for kind in of_device(device):
            yield Condition(device.uuid, kind)
    for excess in snapshot.excesses:
        if excess.unmapped_bytes or excess.allocator:
            yield _of_excess(excess)


def _names(reports: Sequence[AgentReport]) -> str:
    names = [f"{each.workload or 'unnamed'} (uid {each.uid}, connection {each.pid})" for each in reports[:SHOWN_AGENTS]]
    others = len(reports) - len(names)
    return ", ".join([*names, f"{others} others"] if others else names)


def _of_excess(excess: Excess) -> Condition:
    process = f"pid {excess.pid} ({excess.workload})" if excess.workload else f"pid {excess.pid}"
    claimed, limit = human(excess.claimed_bytes), human(excess.limit_bytes)
    if excess.allocator:
        detail = f"{process}: {excess.allocator} claims {claimed}, the device has {limit}: counted as {limit}"
        return Condition(excess.device_uuid, "claim_over_size", detail)
    detail = (
        f"{process}: its allocators claim {claimed}, the driver counts {limit}: {human(excess.unmapped_bytes)} are "
        "inferred to be unmapped"
    )
    return Condition(excess.device_uuid, "unmapped_inferred", detail)


def of_device(device: DeviceReading) -> Iterator[str]:
    if device.missed >= MISSED_LIMIT:
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
    is_counted = device.used_bytes is not None and not device.unified
    if device.vendor == "nvidia" and is_counted and device.reserved_bytes is None and device.parent_uuid is None:
        yield "reserved_in_used"
