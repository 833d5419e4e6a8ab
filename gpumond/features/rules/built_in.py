"""Built-in rules, active unless the configuration replaces or disables them, and the texts of their alerts.

deploy/prometheus/gpumond.rules.yaml has the same rules for fleets, and docs/how-to/runbooks.md a section on each.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gpumond.facts.alerts import Rule, RuleScope
from gpumond.facts.verdicts import VERDICT_REMEDIES

GPU = "GPU {gpu}[ ({name})| on {instance}]"
ON_GPU = "on GPU {gpu}[| on {instance}]"
PROGRAM = f"{{workload}} (pid {{pid}}) {ON_GPU}"
PROCESS = f"[{{program}} (pid {{pid}})|pid {{pid}}] {ON_GPU}"

TEXTS: Mapping[str, tuple[str, str]] = {
    "device-nearly-full": (
        f"{GPU} is nearly full: [{{used}} of {{size}} is used; the largest process is {{top_process}}; a flush would "
        "release {reclaimable}|{value} of its memory is used, not counting what a flush would release]",
        "to see the programs[|, run on that machine]: gpumond status",
    ),
    "reclaimable-waste": (
        f"{GPU} [{{shortage}}|is at least 80% full, or had too little room for a program in the last 10 minutes], and "
        "[{reclaimable}|{value}] of its memory is unused cache[; the largest cache belongs to {top_cache}]",
        "to release the cache[|, run on that machine]: gpumond flush --device {gpu}",
    ),
    "fragmentation": (
        f"{PROGRAM}: {{value}} of its {{allocator}} pool (not counting cached memory) was fragmented even at peak "
        "use[ ({stranded} stranded)]",
        "[{whole_blocks}|set PYTORCH_ALLOC_CONF=expandable_segments:True (PyTorch; before 2.11, "
        "PYTORCH_CUDA_ALLOC_CONF)], then restart the program",
    ),
    "leak": (
        f"[{{verdicts}}|pid {{pid}} {ON_GPU} is leaking memory{{time_to_full}}]",
        f"[{VERDICT_REMEDIES['leak']}|to see what retains the memory, run on that machine: gpumond why --pid {{pid}}]",
    ),
    "out-of-memory": (
        f"{PROGRAM} [{{oom}}|ran out of memory or reached its limit][ ({{value}}x in the last 10 minutes)]",
        "to see why[|, run on that machine]: gpumond oom show --pid {pid}[{advice}]",
    ),
    "allocation-retries": (
        f"{PROGRAM} [{{shortage}}|was short of memory]: {{value}} allocation retries in 10 minutes slowed it down",
        "reduce the batch size[ or {relief}|, free memory on the GPU, or raise the program's limit if it has one]"
        "[{advice}]",
    ),
    "orphan-memory": (
        f"{GPU} has [{{unattributed}}|{{value}} of its memory] in use that the driver attributes to no process",
        "this is usually managed memory (cudaMallocManaged) that no agent reports, or memory of an exited process; "
        "to see the programs, and the processes that have the GPU open[|, run on that machine]: gpumond status",
    ),
    "idle-holder": (
        f"[{{verdicts}}|pid {{pid}} {ON_GPU} has used memory for half an hour without GPU activity]",
        f"[{{idle_remedy}}|on that machine, {VERDICT_REMEDIES['idle-holder']}]",
    ),
    "quota-exceeded": (
        f"{PROCESS} uses [{{used}}, ]{{value}} more than the soft limit of [the {{quota}} quota ({{soft_limit}})|its "
        "quota]",
        "[{soft_limit_remedy}|to release the program's cache, run on that machine: gpumond flush --pid {pid}]",
    ),
    "reserve-unavailable": (
        f"{{value}} of the [{{reserve}} ]reserve of [{{program}} (pid {{pid}}, quota {{reserve_quota}})|pid "
        f"{{pid}}] {ON_GPU} is taken by other programs",
        "to see the programs[|, run on that machine]: gpumond status",
    ),
    "device-lost": (
        "GPU {gpu} [({name}, {uuid})|on {instance} ({uuid})] doesn't respond to its driver",
        "look for Xid errors in dmesg",
    ),
    "xid-errors": (
        f"{GPU} reported Xid [{{xids}}|{{xid}}]",
        "look up the Xid in NVIDIA's catalog, and find the process in dmesg",
    ),
    "thermal-throttling": (
        f"{GPU} is thermally throttled[ at {{temperature}} ({{throttle_reasons}})]",
        "check the GPU's fans, airflow and coolant, or lower its power limit: nvidia-smi -i {uuid} -pl WATTS",
    ),
    "power-throttling": (
        f"{GPU} is power-capped[: {{power}} of {{power_limit}}]",
        "this is normal at full load; if the power limit was lowered, raise it: nvidia-smi -i {uuid} -pl WATTS",
    ),
    "power-brake": (
        f"{GPU} is throttled by the power brake signal",
        "usually, a power supply has failed or is overloaded; check the power supplies and the GPU's power cables",
    ),
    "ecc-uncorrected": (
        f"{GPU} has had uncorrected ECC errors ({{value}} since the driver was loaded): results may be wrong",
        "stop the GPU's programs, run gpumond detach-driver --for 5m and nvidia-smi -i {uuid} --gpu-reset, "
        "and replace the GPU if errors recur",
    ),
    "row-remap-pending": (
        f"{GPU} has a faulty memory row that will be remapped at the next reset",
        "stop the GPU's programs, then run gpumond detach-driver --for 5m and nvidia-smi -i {uuid} --gpu-reset",
    ),
    "row-remap-failed": (
        f"{GPU} has a faulty memory row and no spare row left",
        "move the GPU's programs to another GPU, and replace this one",
    ),
    "retired-pages-pending": (
        f"{GPU} has faulty memory pages that will be retired at the next reset",
        "stop the GPU's programs, then run gpumond detach-driver --for 5m and nvidia-smi -i {uuid} --gpu-reset",
    ),
    "nvlink-errors": (
        f"{GPU} had {{value}} NVLink errors in 10 minutes",
        "to see the errors by link: nvidia-smi nvlink -i {uuid} -e; reseat the GPU or its bridge, and look for Xid 74 "
        "in dmesg",
    ),
    "pcie-link-degraded": (
        f"{GPU} has a degraded PCIe link: [{{pcie_link}} under load; it supports {{pcie_link_max}}|{{value}} of its "
        "bandwidth is missing under load]",
        "reseat the GPU and its riser, and check the slot's firmware settings",
    ),
    "persistence-mode-off": (
        f"{GPU} has persistence mode off, which delays the first program and resets the driver's counters",
        "run nvidia-smi -i {uuid} -pm 1, or enable nvidia-persistenced",
    ),
    "driver-unresponsive": (
        "the driver[| on {instance}] hasn't responded to gpumond for at least 5 s[ ({reason})]",
        "the affected GPUs have no values until the driver responds; look for Xid errors in dmesg",
    ),
    "driver-down": (
        "gpumond[| on {instance}] can't read any GPU[: {reason}|{down_reason}]",
        "to find out why[|, run on that machine]: gpumond doctor",
    ),
    "agent-gone": (
        f"[{{workload}} (pid {{pid}}, {{state}})|pid {{pid}}] {ON_GPU} still uses [{{used}}|{{bytes}}], but its agent "
        "has stopped reporting",
        "check whether the program is hung or stopped",
    ),
    "engine-out-of-service": (
        "{engine} ({kind})[| on {instance}] has been out of service for {value}[ ({reason})]",
        "a release of this engine's memory failed or freed too little, and gpumond keeps trying to wake the engine; if "
        "it stays out of service, restart the server",
    ),
    "store-not-writable": (
        "gpumond[| on {instance}] can't write to its store",
        "monitoring and alerts still work, but changes and flushes are refused; check that the state directory is "
        "writable and its disk has free space",
    ),
}
"""Summary (subject and fact) and description (cause and next step) of each alert, for the daemon and Prometheus.

``[a|b]`` is *a* in the daemon's text and *b* in Prometheus's, whose series lack some labels; ``[a]`` is in the
daemon's only. ``python -m tools.docs.alerts`` writes the texts of deploy/prometheus and deploy/kubernetes/monitoring.
"""

_CHOICE = re.compile(r"\[([^][|]*)(?:\|([^][]*))?\]")
"""The innermost choice: choices may be nested."""


def text_for(template: str, side: int) -> str:
    """Return the daemon's text of a template (side 1), or that of Prometheus (side 2)."""
    while _CHOICE.search(template):
        template = _CHOICE.sub(lambda choice: choice[side] or "", template)
    return template.replace(" PID", " {pid}")


def daemon_texts(rule: str) -> tuple[str, str]:
    """Return the summary and the description of a built-in rule, with the rule's placeholders."""
    summary, description = (text_for(text, 1) for text in TEXTS[rule])
    return summary, description


def _rule(name: str, scope: RuleScope, value: str, severity: str, **fields: Any) -> Rule:
    return Rule(
        name=name,
        scope=scope,
        value=value,
        labels=(("severity", severity),),
        annotations=tuple(zip(("summary", "description"), daemon_texts(name), strict=True)),
        **fields,
    )


BUILT_IN: tuple[Rule, ...] = (
    _rule("device-nearly-full", "device", "unreclaimable_ratio", "warning", above=0.97, clear=0.95, for_seconds=60),
    _rule(
        "reclaimable-waste",
        "device",
        "reclaimable_under_pressure_ratio",
        "warning",
        above=0.2,
        clear=0.15,
        for_seconds=60,
    ),
    _rule(
        "fragmentation",
        "pool",
        "fragmentation_ratio",
        "warning",
        above=0.25,
        clear=0.20,
        for_seconds=30,
        keep_firing_for_seconds=300,  # programs free everything between two rounds, and fragment it again
    ),
    _rule("leak", "process", "leak", "warning", above=0, keep_firing_for_seconds=300),
    _rule("out-of-memory", "pool", "ooms_increase", "critical", above=0, keep_firing_for_seconds=300),
    _rule("allocation-retries", "pool", "retries_increase", "warning", above=5, keep_firing_for_seconds=300),
    _rule("orphan-memory", "device", "unattributed_ratio", "warning", above=0.05, for_seconds=300),
    _rule("idle-holder", "process", "idle_holder", "info", above=0),
    _rule("quota-exceeded", "process", "soft_limit_excess_bytes", "warning", above=0),
    _rule("reserve-unavailable", "process", "reserve_shortage_bytes", "warning", above=0, for_seconds=60),
    _rule("device-lost", "device", "up", "critical", below=1, for_seconds=10),
    _rule("xid-errors", "device", "xid_errors_increase", "warning", above=0),
    _rule("thermal-throttling", "device", "throttle_thermal", "warning", above=0, for_seconds=300),
    _rule("power-throttling", "device", "throttle_sw_power_cap", "info", above=0, for_seconds=900),
    _rule("power-brake", "device", "throttle_hw_power_brake_slowdown", "warning", above=0, for_seconds=60),
    _rule("ecc-uncorrected", "device", "ecc_uncorrected_volatile", "critical", above=0),
    _rule("row-remap-pending", "device", "remapped_rows_pending", "warning", above=0),
    _rule("row-remap-failed", "device", "remapped_rows_failed", "critical", above=0),
    _rule("retired-pages-pending", "device", "retired_pages_pending", "warning", above=0),
    _rule("nvlink-errors", "device", "nvlink_errors_increase", "warning", above=10),
    _rule("pcie-link-degraded", "device", "pcie_link_deficit_ratio", "warning", above=0, for_seconds=300),
    _rule("persistence-mode-off", "device", "persistence_mode", "info", below=1, for_seconds=60),
    _rule("driver-unresponsive", "daemon", "driver_responsive", "critical", below=1),
    _rule("driver-down", "daemon", "driver_up", "critical", below=1, for_seconds=60),
    _rule("agent-gone", "process", "agent_gone", "info", above=0, for_seconds=60),
    _rule("engine-out-of-service", "engine", "out_of_service_seconds", "critical", above=10),
    _rule("store-not-writable", "daemon", "store_writable", "critical", below=1),
)
"""A rule of the same name in the configuration replaces a built-in one."""
