"""PromQL that more than one dashboard uses."""

from __future__ import annotations

FLEET = 'instance=~"$machine"'
DEVICE = 'instance="$machine", uuid="$device"'
WORKLOAD = 'instance=~"$machine", workload="$workload"'

SHARES = ("live", "cached", "stranded", "overhead", "opaque", "unclaimed")
"""From the ground up, as they are stacked."""


def share(name: str, scope: str) -> str:
    return f'gpumond_memory_bytes{{{scope}, share="{name}"}}'


def or_none(count: str, scope: str) -> str:
    """0 where nothing is counted and a daemon is there to say so, else unknown."""
    return f"{count} or sum(gpumond_devices{{{scope}}}) * 0"


def named(expression: str) -> str:
    """With a word where the workload has none, as a legend without text shows none."""
    return f'label_replace({expression}, "workload", "no agent", "workload", "")'


def with_program(expression: str, labels: str = "workload, comm") -> str:
    """With labels of the process, where the pid has one."""
    info = f"max by (job, instance, pid, {labels}) (gpumond_process_info)"
    return f"{expression} * on (job, instance, pid) group_left ({labels}) {info}"


def happening(counter: str, label: str, scope: str) -> str:
    """By how much a counter grew, by ``label``, of what it did grow for in the time shown."""
    series = f"{counter}{{{scope}}}"
    of_late = f"sum by ({label}) (increase({series}[$__range])) > 0"
    return f"sum by ({label}) (increase({series}[$__rate_interval])) and ({of_late})"


def quantile(share_below: float, histogram: str, scope: str) -> str:
    rates = f"sum by (instance, le) (rate({histogram}_bucket{{{scope}}}[$__rate_interval]))"
    return f"histogram_quantile({share_below}, {rates})"
