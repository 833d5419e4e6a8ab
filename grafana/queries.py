"""PromQL that more than one dashboard uses."""

from __future__ import annotations

TARGETS = 'cluster=~"$cluster", job=~"$job"'
FLEET = f'{TARGETS}, instance=~"$machine"'
MACHINE = f'{TARGETS}, instance="$machine"'
DEVICE = f'{MACHINE}, uuid="$device"'
WORKLOAD = f'{FLEET}, workload="$workload"'

TARGET = "cluster, job, instance"
"""Labels of a target of Prometheus. Metrics that have no cluster have an empty one."""
PROCESS = f"{TARGET}, pid"

SHARES = ("live", "cached", "stranded", "overhead", "opaque", "unattributed")
"""From the ground up, as they are stacked."""


def share(name: str, scope: str) -> str:
    return f'gpumond_memory_bytes{{{scope}, share="{name}"}}'


def or_none(count: str, scope: str) -> str:
    """0 where nothing is counted and a daemon is there to say so, else unknown."""
    return f"{count} or sum(gpumond_devices{{{scope}}}) * 0"


def named(expression: str) -> str:
    """With a word where the workload has none, as a legend without text shows none."""
    return f'label_replace({expression}, "workload", "no agent", "workload", "")'


def processes(scope: str, labels: str = "") -> str:
    """Return one series of each process with an owner, with labels of gpumond_process_info."""
    return f"max by ({PROCESS}{labels and f', {labels}'}) (gpumond_process_info{{{scope}}})"


def with_labels(expression: str, labels: str, infos: str) -> str:
    """Return series of processes with labels of ``infos``, of which there is one for each process."""
    return f"{expression} * on ({PROCESS}) group_left ({labels}) {infos}"


def happening(counter: str, label: str, scope: str) -> str:
    """Return by how much a counter grew, by ``label``, of what it did grow for in the time shown.

    Rounded, because Prometheus extrapolates the increase of a counter.
    """
    series = f"{counter}{{{scope}}}"
    of_late = f"sum by ({label}) (increase({series}[$__range])) > 0"
    return f"round(sum by ({label}) (increase({series}[$__rate_interval]))) and ({of_late})"


def quantile(share_below: float, histogram: str, scope: str) -> str:
    rates = f"sum by (instance, le) (rate({histogram}_bucket{{{scope}}}[$__rate_interval]))"
    return f"histogram_quantile({share_below}, {rates})"
