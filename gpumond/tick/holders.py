"""Who holds the memory of a device. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from gpumond.facts.program import ProcessKey
from gpumond.facts.quota import GrantedRequest
from gpumond.facts.snapshot import ProcessUsage, Snapshot
from gpumond.facts.suspension import MemoryHolder

SHOWN = 3


def holders(
    snapshot: Snapshot, device_uuid: str, but: ProcessKey | None, grants: Iterable[GrantedRequest] = ()
) -> tuple[MemoryHolder, ...]:
    """Return who holds or is granted most of a device."""
    device = snapshot.device(device_uuid)
    if device is None:
        return ()
    known: Mapping[ProcessKey, ProcessUsage] = device.processes_by_key
    held = [
        MemoryHolder(key.pid, _name(snapshot, usage), usage.used_bytes)
        for key, usage in known.items()
        if usage.used_bytes and key != but
    ]
    for grant in grants:
        if grant.device_uuid == device_uuid and (but is None or grant.pid != but.pid):
            own = next((each for each in held if each.pid == grant.pid), MemoryHolder(grant.pid, grant.workload, 0))
            held = [each for each in held if each is not own]
            held.append(replace(own, granted_bytes=own.granted_bytes + grant.unused_bytes))
    return tuple(sorted(held, key=lambda each: -each.used_bytes - each.granted_bytes)[:SHOWN])


def _name(snapshot: Snapshot, usage: ProcessUsage) -> str:
    report = snapshot.reports_by_process.get(usage.key)
    return (report.workload if report else "") or usage.comm or ""
