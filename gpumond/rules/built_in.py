"""Built-in rules, active unless the configuration replaces or disables them. Each text has subject, value and next
step.

deploy/prometheus/gpumond.rules.yaml has the same rules for fleets, and docs/how-to/runbooks.md a section on each.
"""

from __future__ import annotations

from typing import Any

from gpumond.model.verdicts import REMEDIES
from gpumond.rules import Rule, Scope


def _rule(name: str, scope: Scope, value: str, severity: str, summary: str, **fields: Any) -> Rule:
    return Rule(
        name=name,
        scope=scope,
        value=value,
        labels=(("severity", severity),),
        annotations=(("summary", summary),),
        **fields,
    )


BUILT_IN: tuple[Rule, ...] = (
    _rule(
        "device-nearly-full",
        "device",
        "used_ratio",
        "warning",
        "GPU {gpu} ({name}): {used} of {size} used, most by {top_process}; a flush returns about {reclaimable}",
        above=0.80,
        clear=0.75,
        for_seconds=60,
    ),
    _rule(
        "reclaimable-waste",
        "device",
        "wasted_ratio",
        "warning",
        "GPU {gpu} ({name}): {reclaimable} is unused cache while memory is short; {top_cache} holds most of it; "
        "gpumond flush --device {uuid} returns it",
        above=0.20,
        clear=0.15,
        for_seconds=60,
    ),
    _rule(
        "fragmentation",
        "pool",
        "fragmentation_ratio",
        "warning",
        "{workload} (pid {pid}) on GPU {gpu}: even at its peak, {value} of the memory that {allocator} holds was free "
        "but fragmented ({stranded} now); set {torch_setting}=expandable_segments:True for torch, or restart "
        "the program",
        above=0.25,
        clear=0.20,
        for_seconds=30,
    ),
    _rule(
        "leak",
        "process",
        "leak",
        "warning",
        f"{{verdicts}}; {REMEDIES['leak']}",
        above=0,
        keep_firing_for_seconds=300,
    ),
    _rule(
        "out-of-memory",
        "pool",
        "ooms_increase",
        "critical",
        "{workload} (pid {pid}) on GPU {gpu} ran out of memory (errors in 10 minutes: {value}): {live} live, "
        "{stranded} stranded; gpumond status shows which other programs hold memory there",
        above=0,
        keep_firing_for_seconds=300,
    ),
    _rule(
        "allocation-retries",
        "pool",
        "retries_increase",
        "warning",
        "{workload} (pid {pid}) on GPU {gpu} had to empty its cache {value} times in 10 minutes to continue: it is "
        "slow and almost out of memory; reduce its batch size, or free memory on the device",
        above=5,
        keep_firing_for_seconds=300,
    ),
    _rule(
        "orphan-memory",
        "device",
        "unclaimed_ratio",
        "warning",
        "GPU {gpu} ({name}): {unclaimed} is used, but no visible process owns it; gpumond status lists the holders",
        above=0.05,
        for_seconds=300,
    ),
    _rule(
        "idle-holder",
        "process",
        "idle_holder",
        "info",
        "{verdicts}; " + REMEDIES["idle-holder"].replace("PID", "{pid}"),
        above=0,
    ),
    _rule(
        "quota-exceeded",
        "process",
        "soft_limit_excess_bytes",
        "warning",
        "{comm} (pid {pid}, workload {workload}) on GPU {gpu} uses {used}, more than the soft limit of {soft_limit} of "
        "the quota {quota}; gpumond flush --pid {pid} releases its cache",
        above=0,
    ),
    _rule(
        "device-lost",
        "device",
        "up",
        "critical",
        "GPU {gpu} ({name}, {uuid}) does not answer its driver; look for Xid in dmesg",
        below=1,
        for_seconds=10,
    ),
    _rule(
        "xid-errors",
        "device",
        "xid_errors_increase",
        "warning",
        "GPU {gpu} ({name}) reported Xid {xids}; NVIDIA's Xid catalogue explains the numbers, dmesg shows the process",
        above=0,
    ),
    _rule(
        "driver-unresponsive",
        "daemon",
        "driver_responsive",
        "critical",
        "a driver call does not return ({reason}); its devices have no values until it returns; look for Xid in dmesg",
        below=1,
    ),
    _rule(
        "driver-down",
        "daemon",
        "driver_up",
        "critical",
        "no device can be read: {reason}",
        below=1,
        for_seconds=60,
    ),
    _rule(
        "agent-gone",
        "process",
        "agent_gone",
        "info",
        "{workload} (pid {pid}, {state}) still holds {used} on GPU {gpu}, but its agent no longer reports; "
        "check whether the program hangs or was stopped",
        above=0,
        for_seconds=60,
    ),
    _rule(
        "store-not-writable",
        "daemon",
        "store_writable",
        "critical",
        "alerts continue, but changes of rules cannot be saved; check that the state directory is writable and its "
        "disk has free space",
        below=1,
    ),
)
"""A rule of the same name in the configuration replaces a built-in one."""
