"""Built-in rules, active unless the configuration replaces or disables them. Each text has subject, value and next
step.

deploy/prometheus/gpumond.rules.yaml has the same rules for fleets, and docs/how-to/runbooks.md a section on each.
"""

from __future__ import annotations

from typing import Any

from gpumond.facts.alerts import Rule, Scope
from gpumond.facts.verdicts import REMEDIES


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
        "unreclaimable_ratio",
        "warning",
        "GPU {gpu} ({name}) is nearly full: {used} of {size} used, most by {top_process}, and a flush returns only "
        "{reclaimable}; gpumond status shows who holds what",
        above=0.97,
        clear=0.95,
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
        "{stranded} stranded; gpumond status shows which other programs hold memory there{advice}",
        above=0,
        keep_firing_for_seconds=300,
    ),
    _rule(
        "allocation-retries",
        "pool",
        "retries_increase",
        "warning",
        "{workload} (pid {pid}) on GPU {gpu} had to empty its cache {value} times in 10 minutes to continue: it is "
        "slow and almost out of memory; reduce its batch size, or free memory on the device{advice}",
        above=5,
        keep_firing_for_seconds=300,
    ),
    _rule(
        "orphan-memory",
        "device",
        "unattributed_ratio",
        "warning",
        "GPU {gpu} ({name}): {unattributed} is used, but the driver counts it for no process: managed memory "
        "(cudaMallocManaged) of a running program without the agent, or memory of an ended process; gpumond status "
        "lists programs and holders",
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
        "reserve-unavailable",
        "process",
        "reserve_shortage_bytes",
        "warning",
        "{comm} (pid {pid}, workload {workload}) on GPU {gpu} uses {used} of its reserve of {reserve} (quota "
        "{reserve_quota}), and {value} of the rest are not available; gpumond status lists the programs that use them",
        above=0,
        for_seconds=60,
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
        "thermal-throttling",
        "device",
        "throttle_thermal",
        "warning",
        "its temperature ({temperature}) slows GPU {gpu} ({name}) down: {throttle_reasons}; check fans, airflow and "
        "coolant, or lower its power limit: nvidia-smi -i {uuid} -pl WATTS",
        above=0,
        for_seconds=300,
    ),
    _rule(
        "power-throttling",
        "device",
        "throttle_sw_power_cap",
        "info",
        "its power limit slows GPU {gpu} ({name}) down: {power} of {power_limit}; this is normal at full load; if the "
        "limit was lowered, raise it: nvidia-smi -i {uuid} -pl WATTS",
        above=0,
        for_seconds=900,
    ),
    _rule(
        "power-brake",
        "device",
        "throttle_hw_power_brake_slowdown",
        "warning",
        "the machine slows GPU {gpu} ({name}) down because its power supply is overloaded; check the power supplies "
        "and the power cables of the device",
        above=0,
        for_seconds=60,
    ),
    _rule(
        "ecc-uncorrected",
        "device",
        "ecc_uncorrected_volatile",
        "critical",
        "GPU {gpu} ({name}) had {value} uncorrected ECC errors since its driver was loaded: results of its programs "
        "may be wrong; stop its programs, run nvidia-smi -i {uuid} --gpu-reset, and replace it if errors recur",
        above=0,
    ),
    _rule(
        "row-remap-pending",
        "device",
        "remapped_rows_pending",
        "warning",
        "GPU {gpu} ({name}) has a faulty row of memory, which it replaces at the next reset; stop its programs, then "
        "run nvidia-smi -i {uuid} --gpu-reset",
        above=0,
    ),
    _rule(
        "row-remap-failed",
        "device",
        "remapped_rows_failed",
        "critical",
        "GPU {gpu} ({name}) has a faulty row of memory and no spare row for it; move its programs to another device, "
        "and replace it",
        above=0,
    ),
    _rule(
        "retired-pages-pending",
        "device",
        "retired_pages_pending",
        "warning",
        "GPU {gpu} ({name}) has faulty pages of memory, which it retires at the next reset; stop its programs, then "
        "run nvidia-smi -i {uuid} --gpu-reset",
        above=0,
    ),
    _rule(
        "nvlink-errors",
        "device",
        "nvlink_errors_increase",
        "warning",
        "GPU {gpu} ({name}) had {value} NVLink errors in 10 minutes; nvidia-smi nvlink -i {uuid} -e lists them by "
        "link; reseat the device or its bridge, and look for Xid 74 in dmesg",
        above=10,
    ),
    _rule(
        "pcie-link-degraded",
        "device",
        "pcie_link_deficit_ratio",
        "warning",
        "the PCIe link of GPU {gpu} ({name}) works with {pcie_link} under load, its maximum is {pcie_link_max}; reseat "
        "the device and its riser, and check the slot's settings in the firmware",
        above=0,
        for_seconds=300,
    ),
    _rule(
        "persistence-mode-off",
        "device",
        "persistence_mode",
        "info",
        "the driver unloads GPU {gpu} ({name}) while no program uses it, so that programs start slowly and its "
        "counters are reset; run nvidia-smi -i {uuid} -pm 1, or enable nvidia-persistenced",
        below=1,
        for_seconds=60,
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
        "engine-out-of-service",
        "engine",
        "returning_seconds",
        "critical",
        "gpumond has released memory of {engine} ({kind}) without effect, and it has not served again for {value}: "
        "{reason}; gpumond repeats the attempt; otherwise restart the server",
        above=10,
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
