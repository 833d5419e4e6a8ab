"""Workload: how does a program use memory over its life?"""

from __future__ import annotations

from grafana.columns import DEVICE, GPU, MACHINE, PID
from grafana.frames import Marks, board, flushes, machine, ooms, workload
from grafana.parts import ANY, BAD, GOOD, PER_SECOND, WARNING, YES, Column, Query, figure, ledger, listing, series
from grafana.queries import FLEET, PROCESS, SHARES, WORKLOAD, happening, processes, quantile, share


def of_programs(expression: str) -> str:
    """Of series that have a pid and no workload: those of this workload's processes."""
    return f"{expression} and on ({PROCESS}) {processes(WORKLOAD)}"


GLANCE = [
    figure(
        "Processes",
        "Processes of the workload with a connected agent.",
        "short",
        f"sum(gpumond_agents{{{WORKLOAD}}})",
        runbooks=("agent-gone",),
    ),
    figure("Live", "Memory allocated to the programs.", "bytes", f"sum({share('live', WORKLOAD)})"),
    figure(
        "Peak",
        "Peak live memory of the largest pool, as reported by its allocator; the program may reset it.",
        "bytes",
        f"max(gpumond_pool_peak_live_bytes{{{WORKLOAD}}})",
    ),
    figure(
        "Reclaimable",
        "Cache that a flush of the workload releases.",
        "bytes",
        f"sum({share('cached', WORKLOAD)})",
        runbooks=("reclaimable-waste",),
    ),
    figure(
        "Stranded",
        "Memory that is held but free, and that a flush can't release: fragmentation.",
        "bytes",
        f"sum({share('stranded', WORKLOAD)})",
        runbooks=("fragmentation",),
    ),
    figure(
        "Time to full",
        "Time until a device is full at the current growth rate; unknown without a growing program.",
        "s",
        f"min({of_programs(f'gpumond_time_to_full_seconds{{{FLEET}}}')})",
        levels=((600, WARNING), (3600, GOOD)),
        below=BAD,
        runbooks=("leak",),
    ),
    figure(
        "Out of memory",
        "Failed allocations in the selected time range.",
        "short",
        f"sum(increase(gpumond_pool_ooms_total{{{WORKLOAD}}}[$__range]))",
        levels=ANY,
        runbooks=("out-of-memory",),
    ),
    figure(
        "Retries",
        "Allocations in the selected time range that succeeded only after the allocator emptied its cache.",
        "short",
        f"sum(increase(gpumond_pool_retries_total{{{WORKLOAD}}}[$__range]))",
        levels=((5, WARNING),),
        runbooks=("allocation-retries",),
    ),
]

LIFE = [
    ledger(
        "Memory by share",
        "The workload's memory by share, on all devices. The dashed line is the allocators' peak live memory, summed "
        "over all pools.",
        WORKLOAD,
        Query(f"sum(gpumond_pool_peak_live_bytes{{{WORKLOAD}}})", "peak of live"),
        shares=SHARES[:-1],  # unattributed memory belongs to no workload
        runbooks=("leak", "fragmentation", "reclaimable-waste"),
    ),
    series(
        "Live, by process",
        "Live memory by process and allocator.",
        "bytes",
        Query(
            f"max by (instance, gpu, pid, allocator) (gpumond_pool_live_bytes{{{WORKLOAD}}})",
            "{{instance}} GPU {{gpu}} {{pid}} {{allocator}}",
        ),
        height=11,
        runbooks=("leak",),
    ),
]


def gained(counter: str) -> str:
    """By how much a counter of the workload's flushes grew."""
    return f"sum(increase(gpumond_workload_{counter}_total{{{WORKLOAD}}}[$__rate_interval]))"


HELD = f"gpumond_pool_held_bytes{{{WORKLOAD}}}"

FLUSHES = [
    series(
        "Before and after",
        "Held and live memory of the allocators. A flush, shown as an annotation, reduces held toward live memory.",
        "bytes",
        Query(f"sum({HELD})", "held"),
        Query(f"sum(gpumond_pool_live_bytes{{{WORKLOAD}}})", "live"),
        Query(f"sum(gpumond_pool_reclaimable_bytes{{{WORKLOAD}}})", "a flush would return"),
        width=12,
    ),
    series(
        "Expected and released",
        "Expected and released memory of the workload's flushes, according to receipts.",
        "bytes",
        Query(gained("flush_expected_bytes"), "expected"),
        Query(gained("flush_released_bytes"), "released"),
        bars=True,
        limits=("expected",),
        width=12,
    ),
    series(
        "Receipts by outcome",
        "Receipts of the workload, one per pool, by outcome. Plans are excluded.",
        "short",
        Query(happening("gpumond_workload_flushes_total", "outcome", WORKLOAD), "{{outcome}}"),
        bars=True,
        stacked=True,
        width=12,
    ),
    series(
        "Duration of flushes",
        "Time from the request to the receipt of one pool on these machines: median and 99th percentile.",
        "s",
        Query(quantile(0.5, "gpumond_flush_duration_seconds", FLEET), "{{instance}} median"),
        Query(quantile(0.99, "gpumond_flush_duration_seconds", FLEET), "{{instance}} 99%"),
        width=12,
    ),
]

GROWTH = [
    series(
        "Time to full, by process",
        "Time until the device is full at the process's current growth rate.",
        "s",
        Query(
            f"min by (instance, gpu, pid) ({of_programs(f'gpumond_time_to_full_seconds{{{FLEET}}}')})",
            "{{instance}} GPU {{gpu}} {{pid}}",
        ),
        width=12,
        runbooks=("leak",),
    ),
    series(
        "Out of memory and retries",
        "Failed allocations in each interval, those that required emptying the cache, and retries by retry_on_oom.",
        "short",
        Query(f"round(sum(increase(gpumond_pool_ooms_total{{{WORKLOAD}}}[$__rate_interval])))", "out of memory"),
        Query(f"round(sum(increase(gpumond_pool_retries_total{{{WORKLOAD}}}[$__rate_interval])))", "retries"),
        Query(f"round(sum(increase(gpumond_oom_retries_total{{{WORKLOAD}}}[$__rate_interval])))", "retry_on_oom"),
        bars=True,
        stacked=True,
        colors={"out of memory": BAD, "retries": WARNING},
        width=12,
        runbooks=("out-of-memory", "allocation-retries"),
    ),
]

STEPS = [
    series(
        "Retained per step",
        "Live memory that each step retains: the trend over 20 readings. A value that stays above zero is a leak.",
        "bytes",
        Query(f"max by (instance, pid) (gpumond_step_retained_bytes{{{WORKLOAD}}})", "{{instance}} {{pid}}"),
        least=None,
        width=12,
        runbooks=("leak",),
    ),
    series(
        "Steps/s",
        "Steps per second, by process.",
        PER_SECOND,
        Query(
            f"sum by (instance, pid) (rate(gpumond_steps_total{{{WORKLOAD}}}[$__rate_interval]))",
            "{{instance}} {{pid}}",
        ),
        width=12,
    ),
    series(
        "Utilization",
        "The programs' device utilization, if the driver reports it.",
        "percentunit",
        Query(
            f"max by (instance, gpu, pid) ({of_programs(f'gpumond_process_utilization_ratio{{{FLEET}}}')})",
            "{{instance}} GPU {{gpu}} {{pid}}",
        ),
        most=1,
        width=12,
        runbooks=("idle-holder",),
    ),
    series(
        "Pinned host memory",
        "Host memory that allocators hold for transfers; it isn't device memory.",
        "bytes",
        Query(
            f"max by (instance, pid, allocator) (gpumond_host_pool_held_bytes{{{WORKLOAD}}})", "{{pid}} {{allocator}}"
        ),
        width=12,
    ),
]

SCOPE = "max by (instance, gpu, uuid, pid, scope)"
ENTRIES = f"max by (instance, pid, scope) (gpumond_scope_entries_total{{{WORKLOAD}}})"
KEPT = f"{SCOPE} (gpumond_scope_retained_bytes{{{WORKLOAD}}})"

VERDICTS = of_programs(f"gpumond_verdict{{{FLEET}}}")

DETAIL = [
    listing(
        "Scopes",
        "Live memory that the programs' measured scopes retain, in total and per entry, and its peak.",
        (Column("scope", "Scope"), MACHINE, GPU, DEVICE, PID),
        Query(KEPT, "Retained", "bytes"),
        Query(f"{KEPT} / on (instance, pid, scope) group_left () {ENTRIES}", "Retained per entry", "bytes"),
        Query(f"{SCOPE} (gpumond_scope_peak_bytes{{{WORKLOAD}}})", "Peak", "bytes"),
        sort="Retained",
        width=16,
        runbooks=("leak",),
    ),
    listing(
        "Verdicts",
        "Verdicts on the programs.",
        (Column("kind", "Verdict"), PID, MACHINE, GPU, DEVICE),
        Query(f"max by (instance, gpu, uuid, pid, kind) ({VERDICTS})", "Active", text=YES),
        sort="Verdict",
        ascending=True,
        width=8,
    ),
]

BOARD = board(
    "workload",
    "Workload",
    "Memory use of one workload's programs over time.",
    [machine(several=True), workload()],
    ("Overview", GLANCE),
    ("Memory over time", LIFE),
    ("Flushes", FLUSHES),
    ("Growth and errors", GROWTH),
    ("Steps, utilization and host memory", STEPS),
    ("Details", DETAIL),
    collapsed=("Steps, utilization and host memory", "Details"),
    marks=[
        flushes(WORKLOAD),
        ooms(WORKLOAD),
        Marks(
            "Verdict", "yellow", f"max by (instance, pid, kind) ({VERDICTS})", "{{kind}} of pid {{pid}} on {{instance}}"
        ),
    ],
)
