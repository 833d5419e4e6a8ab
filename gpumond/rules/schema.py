"""Words of rules by scope: values, labels to match, placeholders.

docs/reference/rules.md is generated from these tables, and a rule with another word is rejected.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpumond.rules import Scope
from gpumond.rules.verdicts import TROUBLES
from gpumond.rules.window import WINDOW_SECONDS

_VERDICTS = {
    **{
        kind.replace("-", "_"): f"1 while the [verdict](../how-to/runbooks.md#verdicts) {kind} is active"
        for kind in TROUBLES
    },
    "leak_bytes_per_second": "by how much a leak grows; 0 without one",
    "time_to_oom_seconds": "until the memory is full if it goes on growing; infinite where nothing does",
}
_VERDICT_TEXTS = {
    "verdicts": "what is said of it, in sentences",
    "slope": "by how much its leak grows each minute",
    "time_to_oom": "until the memory is full",
}
_LATELY = f"in the last {WINDOW_SECONDS / 60:.0f} minutes"
_UNTIL = "zero is unknown until a full window has been observed"

VALUES: Mapping[Scope, Mapping[str, str]] = {
    "device": {
        "up": "1 while the device answers its driver, else 0",
        "used_bytes": "memory in use, without the driver's own reservation",
        "free_bytes": "memory free according to the driver",
        "used_ratio": "used bytes over size",
        "reclaimable_bytes": "what a flush of all programs on it would return",
        "reclaimable_ratio": "reclaimable bytes over size",
        "wasted_ratio": "reclaimable bytes over size while the device is at least 80 % full; while a program on it "
        f"ran short {_LATELY} (out of memory, or a retry), those of the other programs; else 0",
        "stranded_bytes": "held and free in pools, and out of a flush's reach",
        "unclaimed_bytes": "used, and no visible process owns it; unknown where the driver lists no processes",
        "unclaimed_ratio": "unclaimed bytes over size",
        "idle_used_ratio": "used bytes over size while no kernel runs, 0 while one runs",
        "xid_errors_increase": f"XID errors that the driver reported {_LATELY}; {_UNTIL}",
        **_VERDICTS,
    },
    "process": {
        "used_bytes": "the driver's count for the process on the device",
        "used_ratio": "used bytes over the device's size",
        "agent_gone": "1 if the process had an agent that reports no more, 0 while it reports; else unknown",
        **_VERDICTS,
    },
    "pool": {
        "live_bytes": "handed out to the program",
        "held_bytes": "taken from the driver",
        "reclaimable_bytes": "what a flush would return",
        "stranded_bytes": "held and free, and out of a flush's reach",
        "stranded_ratio": "stranded bytes over held bytes, at this moment",
        "fragmentation_ratio": "1 - most live bytes over most bytes that no flush returns (live and stranded), both "
        f"{_LATELY}, so that it is judged at the peak; 0 for pools below 5 % of their device; unknown for the first "
        "minute",
        "ooms": "out-of-memory errors since the program started",
        "ooms_increase": (
            f"out-of-memory errors {_LATELY}, without those after which `retry_on_oom` tried again; {_UNTIL}"
        ),
        "retries": "allocations that succeeded only after a flush, since the program started",
        "retries_increase": f"allocations that succeeded only after a flush, {_LATELY}; {_UNTIL}",
    },
    "workload": {
        "live_bytes": "handed out to the programs of that name",
        "held_bytes": "taken from the driver by the programs of that name",
        "reclaimable_bytes": "what a flush of them would return",
        "stranded_bytes": "held and free, and out of a flush's reach",
    },
    "daemon": {
        "driver_up": "1 while the driver can be read, else 0; unknown until it was tried",
        "driver_responsive": "0 while a driver call is overdue, else 1",
        "agents": "programs with an agent",
        "store_writable": "1 while changes and alerts can be kept on disk, else 0",
    },
}

_DEVICE = {"gpu": "index of the device", "uuid": "its UUID"}

LABELS: Mapping[Scope, Mapping[str, str]] = {
    "device": {**_DEVICE, "workload": "any program on it"},
    "process": {
        **_DEVICE,
        "pid": "of the process; empty for verdicts on memory without a known process",
        "workload": "its workload, or its command's name",
    },
    "pool": {**_DEVICE, "pid": "of the process", "workload": "its workload", "allocator": "of the pool"},
    "workload": {"uid": "of the user", "workload": "the name"},
    "daemon": {},
}
"""Labels that ``match`` can use."""


def matches(scope: Scope) -> Mapping[str, str]:
    """Return the keys of ``match``: the labels, and the device by any of its names."""
    named = {"device": "its index, UUID, the beginning of its UUID, or its PCI address; no glob"}
    return {**LABELS[scope], **(named if "uuid" in LABELS[scope] else {})}


_ALWAYS = {"value": "the rule's value, with its unit", "level": "the rule's level, with its unit"}
_NAMED = {**_ALWAYS, **_DEVICE, "name": "model of the device", "size": "memory of the device"}

PLACEHOLDERS: Mapping[Scope, Mapping[str, str]] = {
    "device": {
        **_NAMED,
        "used": "memory in use",
        "free": "memory free",
        "reclaimable": "what a flush would return",
        "stranded": "held, free and out of a flush's reach",
        "unclaimed": "used, and no visible process owns it",
        "top_process": "the largest process: name, pid, size",
        "top_cache": "the program with the largest cache: name, pid, size",
        "xids": "XID errors of the window, by number",
        **_VERDICT_TEXTS,
    },
    "process": {
        **_NAMED,
        "pid": "of the process",
        "comm": "its command's name",
        "workload": "its workload",
        "used": "the driver's count for it",
        "state": "alive, stopped, uninterruptible, zombie, gone",
        **_VERDICT_TEXTS,
    },
    "pool": {
        **_NAMED,
        "pid": "of the process",
        "workload": "its workload",
        "allocator": "of the pool",
        "live": "handed out to the program",
        "held": "taken from the driver",
        "reclaimable": "what a flush would return",
        "stranded": "held, free and out of a flush's reach",
        "torch_setting": "the environment variable that configures its PyTorch's allocator",
    },
    "workload": {
        **_ALWAYS,
        "uid": "of the user",
        "workload": "the name",
        "live": "handed out to its programs",
        "held": "taken from the driver by its programs",
        "reclaimable": "what a flush of them would return",
        "stranded": "held, free and out of a flush's reach",
    },
    "daemon": {**_ALWAYS, "reason": "why the driver cannot be read"},
}
