"""Fleet: which machines waste, leak, fill? Its queries read recorded sums, and series of which a machine has a few; the
tables of owners and workloads read theirs.
"""

from __future__ import annotations

from gpumond.view.text import COLORS
from grafana.columns import MACHINE, WORKLOAD
from grafana.frames import alerts, board, happened, machine, namespace
from grafana.parts import (
    ANY,
    BAD,
    GOOD,
    NOTE,
    WARNING,
    Column,
    Query,
    figure,
    leads_to,
    ledger,
    listing,
    ranking,
    runbook_of,
    series,
)
from grafana.queries import FLEET, TARGETS, happening, named, or_none

USED = f"gpumond_machine_memory_used_bytes{{{FLEET}}}"
SIZE = f"gpumond_machine_memory_size_bytes{{{FLEET}}}"
VERDICTS = f"gpumond_owner_verdicts{{{FLEET}}}"
LEAKS = f'gpumond_owner_verdicts{{{FLEET}, kind="leak"}}'

OF_PROMETHEUS = (
    "Gpumond(ConfigurationNotLoaded|DaemonAbsent|DaemonDown|MachinesMissing|ManyDaemonsDown|ReadingsStale|RulesMissed)"
)
"""Alerts that only Prometheus has: a daemon that does not respond has no alerts of its own."""
ALERTS = (
    f'gpumond_alerts{{{FLEET}, phase="firing"}} or ALERTS{{{FLEET}, alertname=~"{OF_PROMETHEUS}", alertstate="firing"}}'
)

TO_DEVICE = leads_to("device", machine="__field.labels.instance", device="__field.labels.uuid")
TO_WORKLOAD = leads_to("workload", workload="__field.labels.workload")
OWNER = (
    Column("pod_namespace", "Namespace"),
    Column("user", "User"),
    Column("workload", "Workload", leads_to("workload", workload="__value.raw")),
    Column("slurm_account", "Account"),
)


def of_machines(name: str) -> str:
    """Return a sum that each selected machine states."""
    return f"gpumond_machine_{name}{{{FLEET}}}"


def recorded(name: str) -> str:
    """Return a recorded value of each selected machine."""
    return f"instance:gpumond_{name}{{{FLEET}}}"


def of_share(name: str, scope: str) -> str:
    """Return the bytes of a share of each machine."""
    return f'gpumond_machine_memory_share_bytes{{{scope}, share="{name}"}}'


def of_devices(name: str) -> str:
    """Return a share of each device, as a part of its size."""
    return f'gpumond:device_memory_share:ratio{{{FLEET}, share="{name}"}}'


GLANCE = [
    figure(
        "Devices up",
        "Devices that respond to their driver, MIG instances included.",
        "short",
        f'sum(gpumond_devices{{{FLEET}, state="up"}})',
    ),
    figure(
        "Devices lost",
        "Known devices that don't respond: off the bus, or the device or its driver is being reset.",
        "short",
        f'sum(gpumond_devices{{{FLEET}, state="down"}})',
        levels=ANY,
        runbooks=("device-lost",),
    ),
    figure(
        "Daemons down",
        "Daemons that are Prometheus targets, but can't be scraped.",
        "short",
        f"count(gpumond:up{{{FLEET}}} == 0) or count(gpumond:up{{{FLEET}}}) * 0",
        levels=ANY,
        runbooks=("daemon-down",),
    ),
    figure(
        "Agent coverage",
        "Processes with an agent, as a fraction of all processes on the devices. Only these can be flushed.",
        "percentunit",
        f"sum({of_machines('agent_processes')}) / sum({of_machines('processes')})",
        levels=((0.5, WARNING), (0.9, GOOD)),
        below=BAD,
    ),
    figure(
        "Used",
        "Fraction of all memory in use, as reported by the drivers.",
        "percentunit",
        f"sum({USED}) / sum({SIZE})",
        runbooks=("device-nearly-full",),
    ),
    figure(
        "Wasted, last hour",
        "GiB-hours of the last hour that were cached, stranded, unattributed, or used by idle programs.",
        "suffix: GiB h",
        f"sum({recorded('wasted_gibibyte_hours:sum1h')})",
        runbooks=("reclaimable-waste",),
    ),
    figure(
        "Leaks",
        "Processes with the verdict leak.",
        "short",
        or_none(f"sum({LEAKS})", FLEET),
        levels=ANY,
        runbooks=("leak",),
    ),
    figure(
        "Alerts firing",
        "Firing alerts of the daemons, and those about daemons that only Prometheus has.",
        "short",
        or_none(f"sum({ALERTS})", FLEET),
        levels=((1, WARNING), (10, BAD)),
    ),
]

OVER_TIME = [
    ledger(
        "Memory of the fleet",
        "The ledgers of all devices. The shares sum to used memory. MIG instances are included in their device.",
        FLEET,
        Query(f"sum({SIZE})", "size"),
        of_share=of_share,
    ),
    series(
        "Alerts firing, by severity",
        "Firing alerts of the daemons, and those about daemons that only Prometheus has, over time.",
        "short",
        Query(f"sum by (severity) ({ALERTS})", "{{severity}}"),
        height=11,
        stacked=True,
        colors={"critical": BAD, "warning": WARNING, "info": NOTE},
    ),
    series(
        "Unused memory over time",
        "Wasted: cached, stranded, unattributed, or used by idle programs. Idle and reclaimable: memory that a flush "
        "or the end of idle programs would release.",
        "bytes",
        Query(f"sum({of_machines('wasted_bytes')})", "wasted"),
        Query(f"sum({of_machines('idle_and_reclaimable_bytes')})", "idle and reclaimable"),
        Query(f"sum({of_machines('idle_held_bytes')})", "idle programs"),
        width=16,
        runbooks=("reclaimable-waste", "idle-holder"),
    ),
    series(
        "Processes with an agent",
        "Processes on the devices, and how many of them have an agent.",
        "short",
        Query(f"sum({of_machines('processes')})", "processes"),
        Query(f"sum({of_machines('agent_processes')})", "with an agent"),
    ),
]

RELEASED = [
    series(
        "Released by flushes, by machine",
        "Memory that flushes released, according to receipts.",
        "bytes",
        Query(happening("gpumond_flush_released_bytes_total", "instance", FLEET), "{{instance}}"),
        bars=True,
        stacked=True,
        runbooks=("reclaimable-waste",),
    ),
    series(
        "Released by flushes, by workload",
        "Memory that flushes released in each interval, by workload, on all machines.",
        "bytes",
        Query(
            f"sum by (workload) (workload:gpumond_workload_flush_released_bytes:rate5m{{{TARGETS}}})"
            " * $__interval_ms / 1000 > 0",
            "{{workload}}",
        ),
        bars=True,
        stacked=True,
        runbooks=("reclaimable-waste",),
    ),
    series(
        "Receipts by outcome",
        "Receipts of all machines, one per pool, by outcome.",
        "short",
        Query(happening("gpumond_flushes_total", "outcome", FLEET), "{{outcome}}"),
        bars=True,
        stacked=True,
    ),
]

RANKED = [
    ranking(
        "Fullest devices",
        "Used fraction of the ten fullest devices.",
        "percentunit",
        Query(f"topk(10, gpumond:device_memory_used:ratio{{{FLEET}}})", "{{instance}} GPU {{gpu}}"),
        most=1,
        width=6,
        height=7,
        link=TO_DEVICE,
        runbooks=("device-nearly-full",),
    ),
    ranking(
        "Most reclaimable",
        "The ten devices on which a flush would release the largest fraction of memory.",
        "percentunit",
        Query(f"topk(10, {of_devices('cached')})", "{{instance}} GPU {{gpu}}"),
        color=COLORS["cached"],
        most=1,
        width=6,
        height=7,
        link=TO_DEVICE,
        runbooks=("reclaimable-waste",),
    ),
    ranking(
        "Most stranded",
        "The ten devices with the largest fraction of memory that is held but free, and that a flush can't release: "
        "fragmentation.",
        "percentunit",
        Query(f"topk(10, {of_devices('stranded')})", "{{instance}} GPU {{gpu}}"),
        color=COLORS["stranded"],
        most=1,
        width=6,
        height=7,
        link=TO_DEVICE,
        runbooks=("fragmentation",),
    ),
    ranking(
        "Largest workloads",
        "The ten workloads that use the most memory, on all machines; no agent: programs without an agent.",
        "bytes",
        Query(
            named(f"topk(10, sum by (workload) (gpumond_owner_used_bytes{{{TARGETS}}}))"),
            "{{workload}}",
        ),
        width=6,
        height=7,
        link=TO_WORKLOAD,
    ),
]


OWNER_LABELS = "pod_namespace, user, workload, slurm_account"


def _of_owners(metric: str) -> str:
    owners = f'{TARGETS}, pod_namespace=~"$namespace"'
    return f"sum by ({OWNER_LABELS}) ({metric}{{{owners}}})"


def _most(metric: str) -> str:
    """Return a value of the fifty owners that wasted most."""
    wasted = f"topk(50, {_of_owners('owner:gpumond_wasted_gibibyte_hours:sum1h')})"
    return f"{_of_owners(metric)} and on ({OWNER_LABELS}) {wasted}"


WASTE = [
    listing(
        "Owners",
        "The fifty owners that wasted the most memory in the last hour, on all machines: namespace, user, "
        "workload and Slurm account.",
        OWNER,
        Query(_most("gpumond_owner_used_bytes"), "Used", "bytes"),
        Query(_most("gpumond_owner_cached_bytes"), "Cached", "bytes"),
        Query(_most("gpumond_owner_stranded_bytes"), "Stranded", "bytes"),
        Query(_most("gpumond_owner_idle_and_reclaimable_bytes"), "Idle or cached", "bytes"),
        Query(_most("owner:gpumond_wasted_gibibyte_hours:sum1h"), "Wasted, 1 h", "suffix: GiB h"),
        sort="Wasted, 1 h",
        width=14,
        runbooks=("reclaimable-waste", "idle-holder"),
    ),
    listing(
        "Machines",
        "One row for each machine. MIG instances are included in their device.",
        (Column("cluster", "Cluster"), MACHINE),
        Query(f"sum by (cluster, instance) ({USED}) / sum by (cluster, instance) ({SIZE})", "Used", "percentunit"),
        Query(
            f"sum by (cluster, instance) ({recorded('wasted_gibibyte_hours:sum1h')})",
            "Wasted, 1 h",
            "suffix: GiB h",
        ),
        Query(f"sum by (cluster, instance) ({recorded('agent_coverage:ratio')})", "Agents", "percentunit"),
        Query(f"sum by (cluster, instance) ({LEAKS})", "Leaks"),
        Query(f'sum by (cluster, instance) (gpumond_alerts{{{FLEET}, phase="firing"}})', "Firing"),
        sort="Wasted, 1 h",
        width=10,
    ),
]

DIAGNOSED = [
    listing(
        "Verdicts",
        "Number of active verdicts on processes and devices, except those for healthy patterns.",
        (Column("kind", "Verdict", runbook_of("verdicts")), MACHINE, Column("user", "User"), WORKLOAD),
        Query(f"sum by (instance, user, workload, kind) ({VERDICTS})", "Active"),
        sort="Verdict",
        width=10,
    ),
    listing(
        "Full soon",
        "Time until a device is full at the current growth rate of the owner's programs.",
        (MACHINE, WORKLOAD),
        Query(f"min by (instance, workload) (gpumond_owner_time_to_full_seconds{{{FLEET}}})", "Time left", "s"),
        sort="Time left",
        ascending=True,
        width=6,
        runbooks=("leak",),
    ),
    listing(
        "Alerts",
        "Active alerts of the daemons' rules, each with a link to its runbook.",
        (MACHINE, Column("rule", "Rule", runbook_of("${__value.raw}")), Column("phase", "Phase")),
        Query(f"sum by (instance, rule, phase) (gpumond_alerts{{{FLEET}}})", "Alerts"),
        sort="Rule",
        ascending=True,
        width=8,
    ),
]

FIRING = f'ALERTS{{{FLEET}, alertname=~"Gpumond.+", alertstate="firing"}}'
AGES = f'(time() - ALERTS_FOR_STATE{{{FLEET}, alertname=~"Gpumond.+"}} and ignoring (alertstate) {FIRING})'

MET = ((0.99, WARNING), (0.999, GOOD))
SENT, FAILED = (f"sum(increase(gpumond_notifications{name}_total{{{FLEET}}}[$__range]))" for name in ("", "_failed"))

LEVELS = [
    figure(
        "Daemons reachable",
        "Fraction of the scrapes in the selected time range that succeeded.",
        "percentunit",
        f"avg(avg_over_time(gpumond:up{{{FLEET}}}[$__range]))",
        levels=MET,
        below=BAD,
        width=6,
        runbooks=("daemon-down",),
    ),
    figure(
        "Devices available",
        "Fraction of the selected time range in which known devices responded to their driver.",
        "percentunit",
        f'sum(avg_over_time(gpumond_devices{{{FLEET}, state="up"}}[$__range]))'
        f" / sum(avg_over_time(gpumond_devices{{{FLEET}}}[$__range]))",
        levels=MET,
        below=BAD,
        width=6,
        runbooks=("device-lost",),
    ),
    figure(
        "Notifications delivered",
        "Fraction of the attempts to notify receivers in the selected time range that didn't fail.",
        "percentunit",
        f"1 - {FAILED} / ({SENT} > 0)",
        levels=MET,
        below=BAD,
        width=6,
    ),
    figure(
        "Oldest alert",
        "Time since the condition of Prometheus' oldest firing alert began.",
        "s",
        f"max{AGES}",
        levels=((3600, WARNING), (86_400, BAD)),
        width=6,
    ),
]

RESPONSE = [
    series(
        "Age of firing alerts",
        "Time since the conditions of Prometheus' firing alerts began: the oldest and the median.",
        "s",
        Query(f"max{AGES}", "oldest"),
        Query(f"quantile(0.5, {AGES})", "median"),
        width=12,
    ),
    series(
        "Notifications",
        "The daemons' attempts to notify receivers in each interval, and those that failed.",
        "short",
        Query(f"sum(increase(gpumond_notifications_total{{{FLEET}}}[$__rate_interval]))", "attempts"),
        Query(f"sum(increase(gpumond_notifications_failed_total{{{FLEET}}}[$__rate_interval]))", "failed"),
        bars=True,
        width=12,
    ),
]

BOARD = board(
    "fleet",
    "Fleet",
    "Machines with unused, leaking or nearly full memory. Requires the recording rules in deploy/prometheus.",
    [machine(several=True), namespace()],
    ("Overview", GLANCE),
    ("Over time", OVER_TIME),
    ("Released", RELEASED),
    ("Devices, machines and workloads", RANKED),
    ("Unused memory", WASTE),
    ("Verdicts and alerts", DIAGNOSED),
    ("Service levels", LEVELS),
    ("Response to alerts", RESPONSE),
    marks=[
        happened("Device lost", "red", "device-lost"),
        happened("Out of memory", "orange", "oom"),
        alerts(FLEET, ', severity="critical"'),
    ],
    collapsed=("Released", "Response to alerts"),
)
