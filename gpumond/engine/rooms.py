"""The memory of each device for requests: free, reserved by quotas, and reclaimable. No I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from gpumond.engine.admission import Neighbour, Room
from gpumond.model.process import ProcessKey
from gpumond.model.quota import NO_QUOTA
from gpumond.model.snapshot import AgentReport, DeviceReading, Snapshot

Lending = Literal["user", "all", "off"]
"""The programs that are flushed for another: those of the same user, all, or none."""


@dataclass(frozen=True, slots=True)
class Started:
    """The program of a grant: its process if it is known, its user, and the memory that was granted."""

    process: ProcessKey | None
    uid: int | None
    device_uuid: str
    need_bytes: int


def allocated(snapshot: Snapshot, started: Mapping[str, Started]) -> dict[str, int]:
    """Return the bytes that the processes of each grant hold on its device. Absent: none of them is known there."""
    found: dict[str, int] = {}
    for name, own in started.items():
        device = snapshot.device(own.device_uuid)
        keys = members(snapshot, name, own)
        sizes = [used(device, key, snapshot) for key in keys] if device else []
        if known := [size for size in sizes if size is not None]:
            found[name] = sum(known)
    return found


def members(snapshot: Snapshot, name: str, own: Started) -> set[ProcessKey]:
    """Return the processes of a grant: the one that was started, and those whose agent names the grant."""
    named = {each.key for each in snapshot.reports if each.admission == name and own.uid in (None, each.uid)}
    return named | ({own.process} if own.process else set())


def used(device: DeviceReading, key: ProcessKey, snapshot: Snapshot) -> int | None:
    """Return the driver's count for a process, else the bytes that its allocators hold; None if it holds none."""
    process = device.processes_by_key.get(key)
    if process is not None and process.used_bytes is not None:
        return process.used_bytes
    report = snapshot.reports_by_process.get(key)
    held = [pool.held_bytes for pool in report.pools if _own(pool.device_uuid, device, pool.inside)] if report else []
    return sum(held) if held else None


def rooms(snapshot: Snapshot, started: Mapping[str, Started], lending: Lending) -> list[Room]:
    """Return the memory of each device. The memory of a device without a current reading is unknown."""
    granted = {
        (own.device_uuid, key): own.need_bytes for name, own in started.items() for key in members(snapshot, name, own)
    }
    reports: defaultdict[str, list[AgentReport]] = defaultdict(list)
    for report in snapshot.reports if lending != "off" else ():
        if report.flush_policy != "never":
            for uuid in {pool.device_uuid for pool in report.pools}:
                reports[uuid].append(report)
    return [_room(device, snapshot, granted, lending, reports[device.uuid]) for device in snapshot.devices]


def _room(
    device: DeviceReading,
    snapshot: Snapshot,
    granted: Mapping[tuple[str, ProcessKey], int],
    lending: Lending,
    reports: Sequence[AgentReport],
) -> Room:
    reserved, holders = 0, set[int]()
    for key, quota in snapshot.quotas_by_process.items():
        held = used(device, key, snapshot) if quota.reserve_bytes is not None else None
        if held is not None and quota.reserve_bytes is not None:
            unused = quota.reserve_bytes - max(held, granted.get((device.uuid, key), 0))
            if unused > 0:
                reserved += unused
                holders |= _uids(device, key, snapshot)
    return Room(
        uuid=device.uuid,
        size_bytes=device.size_bytes,
        free_bytes=_free(device),
        reserved_bytes=reserved,
        lenders=None if lending == "all" else frozenset(holders),
        neighbours=tuple(_neighbours(device, snapshot, granted, reports)),
    )


def _neighbours(
    device: DeviceReading,
    snapshot: Snapshot,
    granted: Mapping[tuple[str, ProcessKey], int],
    reports: Sequence[AgentReport],
) -> Iterator[Neighbour]:
    for report in reports:
        if (device.uuid, report.key) in granted:
            continue
        pools = [pool for pool in report.pools if _own(pool.device_uuid, device, pool.inside)]
        reserve = snapshot.quotas_by_process.get(report.key, NO_QUOTA).reserve_bytes or 0
        held = used(device, report.key, snapshot) or 0
        reclaimable = min(sum(pool.reclaimable.likely for pool in pools), max(0, held - reserve))
        if reclaimable > 0:
            yield _neighbour(device, report, reclaimable, sum(pool.thrashes for pool in pools))


def _neighbour(device: DeviceReading, report: AgentReport, reclaimable: int, thrashes: int) -> Neighbour:
    process = device.processes_by_key.get(report.key)
    return Neighbour(
        process=report.key,
        uid=report.uid,
        workload=report.workload,
        reclaimable_bytes=reclaimable,
        idle_seconds=process.idle_seconds if process else None,
        thrashes=thrashes,
    )


def _own(device_uuid: str, device: DeviceReading, inside: str | None) -> bool:
    return device_uuid == device.uuid and inside is None


def _free(device: DeviceReading) -> int | None:
    if device.missed or not device.up:
        return None
    if device.free_bytes is not None:
        return device.free_bytes
    if device.size_bytes is None or device.used_bytes is None:
        return None
    return max(0, device.size_bytes - device.used_bytes)


def _uids(device: DeviceReading, key: ProcessKey, snapshot: Snapshot) -> set[int]:
    process, report = device.processes_by_key.get(key), snapshot.reports_by_process.get(key)
    uid = report.uid if report else process.uid if process else None
    return set() if uid is None else {uid}
