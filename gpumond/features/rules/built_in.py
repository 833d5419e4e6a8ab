"""Built-in rules, active unless the configuration replaces or disables them. ``summaries`` has their texts.

deploy/prometheus/gpumond.rules.yaml has the same rules for fleets, and docs/how-to/runbooks.md a section on each.
"""

from __future__ import annotations

from typing import Any

from gpumond.facts.alerts import Rule, Scope
from gpumond.features.rules.summaries import daemon_summary


def _rule(name: str, scope: Scope, value: str, severity: str, **fields: Any) -> Rule:
    return Rule(
        name=name,
        scope=scope,
        value=value,
        labels=(("severity", severity),),
        annotations=(("summary", daemon_summary(name)),),
        **fields,
    )


BUILT_IN: tuple[Rule, ...] = (
    _rule("device-nearly-full", "device", "unreclaimable_ratio", "warning", above=0.97, clear=0.95, for_seconds=60),
    _rule("reclaimable-waste", "device", "wasted_ratio", "warning", above=0.20, clear=0.15, for_seconds=60),
    _rule("fragmentation", "pool", "fragmentation_ratio", "warning", above=0.25, clear=0.20, for_seconds=30),
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
