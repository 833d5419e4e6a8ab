"""The rules that hold unless the configuration replaces or disables them. Each says who, how much, and what next.

deploy/prometheus/gpumond.rules.yaml has the same for fleets, and docs/operations.md a section on each.
"""

from __future__ import annotations

from typing import Any

from gpumond.rules import Rule, Scope


def _rule(name: str, scope: Scope, value: str, severity: str, summary: str, **fields: Any) -> Rule:
    return Rule(name, scope, value, labels=(("severity", severity),), annotations=(("summary", summary),), **fields)


BUILT_IN: tuple[Rule, ...] = (
    _rule(
        "device-nearly-full",
        "device",
        "used_ratio",
        "warning",
        "GPU {gpu} ({name}): {used} of {size} used, most by {top_process}; a flush would return {reclaimable}",
        above=0.80,
        clear=0.75,
        for_seconds=60,
    ),
    _rule(
        "reclaimable-waste",
        "device",
        "wasted_ratio",
        "warning",
        "GPU {gpu} ({name}): {reclaimable} are cache while memory is short, most of it held by {top_cache}; "
        "gpumond flush --device {uuid} would return it",
        above=0.20,
        clear=0.15,
        for_seconds=60,
    ),
    _rule(
        "fragmentation",
        "pool",
        "fragmentation_ratio",
        "warning",
        "{workload} (pid {pid}) on GPU {gpu}: even at its peak {value} of what {allocator} keeps was free and split up "
        "({stranded} now); torch: {torch_setting}=expandable_segments:True, else restart it",
        above=0.25,
        clear=0.20,
        for_seconds=30,
    ),
    _rule(
        "leak",
        "process",
        "leak",
        "warning",
        "{verdicts}; restart it when it suits, and look for what it keeps: tensors in a list, graphs, a cache without "
        "bounds",
        above=0,
        keep_firing_for_seconds=300,
    ),
    _rule(
        "out-of-memory",
        "pool",
        "ooms_increase",
        "critical",
        "{workload} (pid {pid}) on GPU {gpu} ran out of memory, {value} times in 10 minutes: {live} live, {stranded} "
        "stranded; see who else holds memory there with gpumond status",
        above=0,
        keep_firing_for_seconds=300,
    ),
    _rule(
        "allocation-retries",
        "pool",
        "retries_increase",
        "warning",
        "{workload} (pid {pid}) on GPU {gpu} had to empty its cache {value} times in 10 minutes to go on: it is slow "
        "and close to out of memory; give it a smaller batch, or room",
        above=5,
        keep_firing_for_seconds=300,
    ),
    _rule(
        "orphan-memory",
        "device",
        "unclaimed_ratio",
        "warning",
        "GPU {gpu} ({name}): {unclaimed} are used and no visible process owns them; gpumond status names the holders",
        above=0.05,
        for_seconds=300,
    ),
    _rule(
        "idle-holder",
        "process",
        "idle_holder",
        "info",
        "{verdicts}; end it, or flush it with gpumond flush --pid {pid}",
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
        "GPU {gpu} ({name}) reported Xid {xids}; NVIDIA's Xid catalogue says what each means, dmesg whom it hit",
        above=0,
    ),
    _rule(
        "driver-unresponsive",
        "daemon",
        "driver_responsive",
        "critical",
        "a driver call does not return ({reason}); values are withheld until it does; look for Xid in dmesg",
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
        "{workload} (pid {pid}, {state}) still holds {used} on GPU {gpu}, and its agent reports no more; "
        "see whether the program hangs or was stopped",
        above=0,
        for_seconds=60,
    ),
    _rule(
        "store-not-writable",
        "daemon",
        "store_writable",
        "critical",
        "alerts go on, but no change of a rule can be kept: see that the state directory's disk has room and is "
        "writable",
        below=1,
    ),
)
"""A rule of the same name in the configuration replaces one."""
