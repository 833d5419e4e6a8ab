"""Workload: how does a program use memory over its life?"""

from __future__ import annotations

from grafana.frames import board, happened, machine, workload
from grafana.parts import (
    ANY,
    BAD,
    GOOD,
    PER_SECOND,
    WARNING,
    Column,
    Query,
    figure,
    leads_to,
    ledger,
    listing,
    series,
)
from grafana.queries import FLEET, SHARES, WORKLOAD, happening, quantile, share

MACHINE = Column("instance", "Machine", leads_to("device", machine="__value.raw"))
DEVICE = Column("uuid", "Device", leads_to("device", machine='__data.fields["Machine"]', device="__value.raw"))
PID = Column("pid", "PID")
PROGRAMS = f"max by (job, instance, pid) (gpumond_process_info{{{WORKLOAD}}})"


def of_programs(expression: str) -> str:
    """Of series that have a pid and no workload: those of this workload's processes."""
    return f"{expression} and on (job, instance, pid) {PROGRAMS}"


GLANCE = [
    figure(
        "Programs",
        "Programs of the workload whose agent is connected.",
        "short",
        f"sum(gpumond_agents{{{WORKLOAD}}})",
        runbooks=("agent-gone",),
    ),
    figure("Live", "Memory handed out to the programs.", "bytes", f"sum({share('live', WORKLOAD)})"),
    figure(
        "Peak",
        "The most live memory so far of the largest pool, as its allocator marks it; the program may reset the mark.",
        "bytes",
        f"max(gpumond_pool_peak_live_bytes{{{WORKLOAD}}})",
    ),
    figure(
        "Reclaimable",
        "Cache that a flush of the workload returns.",
        "bytes",
        f"sum({share('cached', WORKLOAD)})",
        runbooks=("reclaimable-waste",),
    ),
    figure(
        "Stranded",
        "Held and free, and no flush returns it: fragmentation.",
        "bytes",
        f"sum({share('stranded', WORKLOAD)})",
        runbooks=("fragmentation",),
    ),
    figure(
        "Time to full",
        "Until a device is full if the programs go on growing as they do; unknown while none is seen to grow.",
        "s",
        f"min({of_programs(f'gpumond_time_to_oom_seconds{{{FLEET}}}')})",
        levels=((600, WARNING), (3600, GOOD)),
        below=BAD,
        runbooks=("leak",),
    ),
    figure(
        "Out of memory",
        "Allocations that failed, in the time shown.",
        "short",
        f"sum(increase(gpumond_pool_ooms_total{{{WORKLOAD}}}[$__range]))",
        levels=ANY,
        runbooks=("out-of-memory",),
    ),
    figure(
        "Retries",
        "Allocations that succeeded only after the allocator had emptied its cache, in the time shown.",
        "short",
        f"sum(increase(gpumond_pool_retries_total{{{WORKLOAD}}}[$__range]))",
        levels=((5, WARNING),),
        runbooks=("allocation-retries",),
    ),
]

LIFE = [
    ledger(
        "Memory over its life",
        "What the workload holds, by share, on all devices. The dashed line is the allocators' own mark of the most "
        "that was live, all pools together.",
        WORKLOAD,
        Query(f"sum(gpumond_pool_peak_live_bytes{{{WORKLOAD}}})", "peak of live"),
        shares=SHARES[:-1],  # what is unclaimed is nobody's
        runbooks=("leak", "fragmentation", "reclaimable-waste"),
    ),
    series(
        "Live, by program",
        "Memory handed out, by program and allocator.",
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
        "What the allocators hold, and what of it is live: a flush, marked, takes the one down towards the other.",
        "bytes",
        Query(f"sum({HELD})", "held"),
        Query(f"sum(gpumond_pool_live_bytes{{{WORKLOAD}}})", "live"),
        Query(f"sum(gpumond_pool_reclaimable_bytes{{{WORKLOAD}}})", "a flush would return"),
    ),
    series(
        "Held before and after",
        "What pools of the workload held when flushes began, and when they were over, by their receipts.",
        "bytes",
        Query(gained("flush_before_bytes"), "before"),
        Query(gained("flush_after_bytes"), "after"),
        bars=True,
    ),
    series(
        "Expected and given back",
        "What flushes of the workload were expected to return, and what they returned, by their receipts.",
        "bytes",
        Query(gained("flush_expected_bytes"), "expected"),
        Query(gained("flush_released_bytes"), "given back"),
        bars=True,
        limits=("expected",),
    ),
    series(
        "Receipts by outcome",
        "Flushes of the workload, pool by pool; outcomes that there were. What was planned only does not count.",
        "short",
        Query(happening("gpumond_workload_flushes_total", "outcome", WORKLOAD), "{{outcome}}"),
        bars=True,
        stacked=True,
    ),
    series(
        "Pools shrank by",
        "By how much the allocators' pools shrank from one point to the next, by program, whoever asked for it.",
        "bytes",
        Query(
            f"sum by (instance, pid) (clamp_min({HELD} offset $__interval - {HELD}, 0))",
            "{{instance}} {{pid}}",
        ),
        bars=True,
        stacked=True,
    ),
    series(
        "How long flushes took",
        "From the request to the receipt of one pool, on these machines: half of them, and 99 of 100, took less.",
        "s",
        Query(quantile(0.5, "gpumond_flush_duration_seconds", FLEET), "{{instance}} half"),
        Query(quantile(0.99, "gpumond_flush_duration_seconds", FLEET), "{{instance}} 99 %"),
    ),
]

GROWTH = [
    series(
        "Time to full, by program",
        "Until the device is full if the program goes on growing as it does.",
        "s",
        Query(
            f"min by (instance, gpu, pid) ({of_programs(f'gpumond_time_to_oom_seconds{{{FLEET}}}')})",
            "{{instance}} GPU {{gpu}} {{pid}}",
        ),
        runbooks=("leak",),
    ),
    series(
        "Kept by each step",
        "Live memory that each step keeps: the trend over the last steps. Above zero for long: a leak.",
        "bytes",
        Query(f"max by (instance, pid) (gpumond_step_kept_bytes{{{WORKLOAD}}})", "{{instance}} {{pid}}"),
        least=None,
        runbooks=("leak",),
    ),
    series(
        "Pace",
        "Steps a second, by program.",
        PER_SECOND,
        Query(
            f"sum by (instance, pid) (rate(gpumond_steps_total{{{WORKLOAD}}}[$__rate_interval]))",
            "{{instance}} {{pid}}",
        ),
    ),
    series(
        "How busy",
        "How busy the programs kept their devices, where the driver tells.",
        "percentunit",
        Query(
            f"max by (instance, gpu, pid) ({of_programs(f'gpumond_process_utilization_ratio{{{FLEET}}}')})",
            "{{instance}} GPU {{gpu}} {{pid}}",
        ),
        most=1,
        runbooks=("idle-holder",),
    ),
    series(
        "Out of memory and retries",
        "Allocations that failed, that needed the cache emptied, and calls that retry_on_oom tried again, a minute.",
        "short",
        Query(f"sum(rate(gpumond_pool_ooms_total{{{WORKLOAD}}}[$__rate_interval])) * 60", "out of memory"),
        Query(f"sum(rate(gpumond_pool_retries_total{{{WORKLOAD}}}[$__rate_interval])) * 60", "retries"),
        Query(f"sum(rate(gpumond_oom_retries_total{{{WORKLOAD}}}[$__rate_interval])) * 60", "retry_on_oom"),
        runbooks=("out-of-memory", "allocation-retries"),
    ),
    series(
        "Pinned host memory",
        "What allocators hold of the machine's memory for transfers; no memory of a device.",
        "bytes",
        Query(
            f"max by (instance, pid, allocator) (gpumond_host_pool_held_bytes{{{WORKLOAD}}})", "{{pid}} {{allocator}}"
        ),
    ),
]

SCOPE = "max by (instance, uuid, pid, scope)"
ENTRIES = f"max by (instance, pid, scope) (gpumond_scope_entries_total{{{WORKLOAD}}})"
KEPT = f"{SCOPE} (gpumond_scope_kept_bytes{{{WORKLOAD}}})"

DETAIL = [
    listing(
        "Scopes",
        "What the named blocks of the programs keep of live memory, all passes together and each, and their peak.",
        (Column("scope", "Scope"), MACHINE, DEVICE, PID),
        Query(KEPT, "Kept", "bytes"),
        Query(f"{KEPT} / on (instance, pid, scope) group_left () {ENTRIES}", "Kept each pass", "bytes"),
        Query(f"{SCOPE} (gpumond_scope_peak_bytes{{{WORKLOAD}}})", "Peak", "bytes"),
        sort="Kept",
        width=16,
        runbooks=("leak",),
    ),
    listing(
        "Verdicts",
        "What the curves of the programs say.",
        (Column("kind", "Verdict"), PID, MACHINE, DEVICE),
        Query(f"max by (instance, uuid, pid, kind) ({of_programs(f'gpumond_verdict{{{FLEET}}}')})", "Stands"),
        sort="Verdict",
        ascending=True,
        width=8,
    ),
]

BOARD = board(
    "workload",
    "Workload",
    "How does a program use memory over its life?",
    [machine(several=True), workload()],
    ("At a glance", GLANCE),
    ("Its life", LIFE),
    ("Flushes", FLUSHES),
    ("Growth and trouble", GROWTH),
    ("In detail", DETAIL),
    marks=[
        happened("Flush", "green", "flush"),
        happened("Out of memory", "orange", "oom"),
        happened("Verdict began", "yellow", "verdict-began"),
    ],
)
