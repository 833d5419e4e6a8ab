"""The memory of each device for requests: free, reserved by quotas, and reclaimable. No I/O."""

from __future__ import annotations

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
    for name, keys in members(snapshot, started).items():
        device = snapshot.device(started[name].device_uuid)
        sizes = [snapshot.used_by(key, device) for key in keys] if device else []
        if known := [size for size in sizes if size is not None]:
            found[name] = sum(known)
    return found


def members(snapshot: Snapshot, started: Mapping[str, Started]) -> dict[str, set[ProcessKey]]:
    """Return the processes of each grant: the one that was started, and those whose agent names the grant."""
    found: dict[str, set[ProcessKey]] = {name: {own.process} if own.process else set() for name, own in started.items()}
    for report in snapshot.reports if started else ():
        grant = started.get(report.admission)
        if grant is not None and grant.uid in (None, report.uid):
            found[report.admission].add(report.key)
    return found


def rooms(
    snapshot: Snapshot, started: Mapping[str, Started], lending: Lending, devices: Sequence[DeviceReading] | None = None
) -> list[Room]:
    """Return the memory of each device, or of ``devices``. Without a current reading, the memory is unknown."""
    granted = {
        (started[name].device_uuid, key): started[name].need_bytes
        for name, keys in members(snapshot, started).items()
        for key in keys
    }
    return [_room(each, snapshot, granted, lending) for each in (snapshot.devices if devices is None else devices)]


def _room(
    device: DeviceReading, snapshot: Snapshot, granted: Mapping[tuple[str, ProcessKey], int], lending: Lending
) -> Room:
    reserved, holders = 0, set[int]()
    for key, unused in snapshot.unused_reserves.get(device.uuid, {}).items():
        quotas = snapshot.quotas_by_process
        own = quotas[key]
        grants = (
            need
            for (uuid, other), need in granted.items()
            if uuid == device.uuid and quotas.get(other, NO_QUOTA).reserve_quota == own.reserve_quota
        )
        ungranted = min(unused, (own.reserve_bytes or 0) - sum(grants))
        if ungranted > 0:
            reserved += ungranted
            holders |= _uids(device, key, snapshot)
    return Room(
        uuid=device.uuid,
        size_bytes=device.size_bytes,
        free_bytes=device.current_free_bytes,
        reserved_bytes=min(reserved, reserved if device.size_bytes is None else device.size_bytes),
        lenders=None if lending == "all" else frozenset(holders),
        neighbours=() if lending == "off" else tuple(_neighbours(device, snapshot, granted)),
    )


def _neighbours(
    device: DeviceReading, snapshot: Snapshot, granted: Mapping[tuple[str, ProcessKey], int]
) -> Iterator[Neighbour]:
    for report in snapshot.reports_by_device.get(device.uuid, ()):
        if report.flush_policy == "never" or (device.uuid, report.key) in granted:
            continue
        pools = [pool for pool in report.pools if pool.device_uuid == device.uuid and pool.inside is None]
        reserve = snapshot.quotas_by_process.get(report.key, NO_QUOTA).reserve_bytes or 0
        held = snapshot.used_by(report.key, device) or 0
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


def _uids(device: DeviceReading, key: ProcessKey, snapshot: Snapshot) -> set[int]:
    process, report = device.processes_by_key.get(key), snapshot.reports_by_process.get(key)
    uid = report.uid if report else process.uid if process else None
    return set() if uid is None else {uid}
