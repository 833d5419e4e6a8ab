"""Owners of the programs on the devices, and which of them have series of their own. No I/O."""

from __future__ import annotations

from collections.abc import Mapping

from gpumond.facts.frame import Owner
from gpumond.facts.program import ProcessKey
from gpumond.facts.snapshot import AgentReport, ProcessUsage, Snapshot

MAX_OWNERS = 64
"""Owners with series of their own: this number of those with a workload, and of those without."""
KEPT_SECONDS = 86_400.0
"""Time for which an owner without a program keeps its place, so that a day has at most ``MAX_OWNERS`` of them."""


def owners_of(snapshot: Snapshot) -> Mapping[ProcessKey, Owner]:
    """Return the owner of each process that a device lists or whose agent has used a device."""
    reports = snapshot.reports_by_process
    owners = {key: _owner(None, report) for key, report in reports.items() if report.uses_device}
    for device in snapshot.devices:
        for key, process in device.processes_by_key.items():
            owners[key] = _owner(process, reports.get(key))
    return owners


def _owner(process: ProcessUsage | None, report: AgentReport | None) -> Owner:
    uid = process.uid if process else report.uid if report else None
    user = process.user if process else None
    return Owner(
        workload=report.workload if report else "",
        user=user or ("" if uid is None else str(uid)),
        pod_namespace=(process.pod_namespace if process else None) or "",
        slurm_account=report.account if report else "",
    )


def admitted(before: Mapping[Owner, float], snapshot: Snapshot) -> dict[Owner, float]:
    """Return the owners that have series, with the elapsed seconds at which each last had a program.

    ``before``: those of the previous frame. An owner beyond the limit is replaced by the same one without its workload.
    """
    now = snapshot.elapsed_seconds
    kept = {owner: seen for owner, seen in before.items() if now - seen < KEPT_SECONDS}
    named = sum(bool(owner.workload) for owner in kept)
    room = {True: MAX_OWNERS - named, False: MAX_OWNERS - (len(kept) - named)}
    for owner in dict.fromkeys(owners_of(snapshot).values()):
        for each in dict.fromkeys((owner, owner._replace(workload=""))):
            if each not in kept:
                if room[bool(each.workload)] <= 0:
                    continue
                room[bool(each.workload)] -= 1
            kept[each] = now
            break
    return kept


def shown(owner: Owner, owners: Mapping[Owner, float] | None) -> Owner:
    """Return the owner whose series contain this one: itself, itself without its workload, or the one without labels.

    ``owners``: those with series; None if all have.
    """
    if owners is None or owner in owners:
        return owner
    coarse = owner._replace(workload="")
    return coarse if coarse in owners else NOBODY


NOBODY = Owner()
