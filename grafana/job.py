"""Job: how much memory does each rank of a job use, over all machines?"""

from __future__ import annotations

from grafana.columns import MACHINE, PID
from grafana.frames import Marks, board, flushes, job, machine
from grafana.parts import ANY, BAD, PER_SECOND, WARNING, Column, Query, figure, listing, ranking, series
from grafana.queries import FLEET, PROCESS, processes, with_labels

OF_JOB = f'{FLEET}, job_id="$job_id"'
RANKS = processes(OF_JOB, "rank")
PAST_RANKS = f"max by ({PROCESS}, rank) (max_over_time(gpumond_process_info{{{OF_JOB}}}[$__range]))"
"""Includes ranks that have ended in the selected time range."""


def of_ranks(expression: str, ranks: str = RANKS) -> str:
    """Return the series of the job's processes, with the label rank."""
    return with_labels(expression, "rank", ranks)


USED = of_ranks(f"gpumond_process_memory_used_bytes{{{FLEET}}}")
OOMS = of_ranks(f"increase(gpumond_pool_ooms_total{{{FLEET}}}[$__range])", PAST_RANKS)
BY_RANK = f"sum by (rank, instance) ({USED})"
RANK = "rank {{rank}} {{instance}}"


def deviation(labels: str) -> str:
    """Return the distance of each rank from the median, relative to the median."""
    used = f"sum by ({labels}) ({USED})"
    return f"abs({used} / scalar(quantile(0.5, {used})) - 1)"


GLANCE = [
    figure(
        "Ranks",
        "Ranks of the job that use a device.",
        "short",
        f"count({BY_RANK})",
        runbooks=("agent-gone",),
        width=4,
    ),
    figure(
        "Machines",
        "Machines on which ranks of the job use a device.",
        "short",
        f"count(sum by (instance) ({USED}))",
        width=4,
    ),
    figure("Used", "Device memory of all ranks, as reported by the driver.", "bytes", f"sum({USED})", width=4),
    figure("Median", "Device memory of the median rank.", "bytes", f"quantile(0.5, {BY_RANK})", width=4),
    figure(
        "Largest deviation",
        "Distance of the outlier rank from the median, relative to the median.",
        "percentunit",
        f"max({deviation('rank, instance')})",
        levels=((0.1, WARNING), (0.25, BAD)),
        width=4,
    ),
    figure(
        "Out of memory",
        "Failed allocations of all ranks in the selected time range, even ranks that have exited.",
        "short",
        f"sum({OOMS})",
        levels=ANY,
        runbooks=("out-of-memory",),
        width=4,
    ),
]

MEMORY = [
    series(
        "Memory by rank",
        "Device memory of each rank, as reported by the driver. The ranks of most jobs use the same amount.",
        "bytes",
        Query(BY_RANK, RANK),
        width=16,
        height=9,
        runbooks=("leak",),
    ),
    ranking(
        "Outlier ranks",
        "Ranks whose memory differs most from the median, relative to the median; above 10% in orange, above 25% in "
        "red.",
        "percentunit",
        Query(f"topk(8, {deviation('rank, instance')})", RANK),
        levels=((0.1, WARNING), (0.25, BAD)),
        height=9,
    ),
]

CAUSES = [
    series(
        "Live, by rank",
        "Live memory of the allocators of each rank.",
        "bytes",
        Query(f"sum by (rank, instance) ({of_ranks(f'gpumond_pool_live_bytes{{{FLEET}}}')})", RANK),
        runbooks=("leak",),
    ),
    series(
        "Reclaimable, by rank",
        "Cache that a flush of each rank releases. `gpumond fleet flush` flushes all ranks in one wave.",
        "bytes",
        Query(f"sum by (rank, instance) ({of_ranks(f'gpumond_pool_reclaimable_bytes{{{FLEET}}}')})", RANK),
        runbooks=("reclaimable-waste",),
    ),
    series(
        "Steps/s, by rank",
        "Steps per second of each rank. A rank that is slower than the others delays all of them.",
        PER_SECOND,
        Query(
            f"sum by (rank, instance) ({of_ranks(f'rate(gpumond_steps_total{{{FLEET}}}[$__rate_interval])')})",
            RANK,
        ),
    ),
]

OWN = "rank, instance, pid"
NEW_OOMS = of_ranks(f"increase(gpumond_pool_ooms_total{{{FLEET}}}[$__rate_interval])")

DETAIL = [
    listing(
        "Ranks and processes",
        "Memory of each rank, its distance from the median, and its failed allocations in the selected time range.",
        (Column("rank", "Rank"), MACHINE, PID),
        Query(f"sum by ({OWN}) ({USED})", "Used", "bytes"),
        Query(deviation(OWN), "Deviation", "percentunit"),
        Query(f"round(sum by ({OWN}) ({OOMS}))", "Out of memory", "short"),
        sort="Deviation",
        runbooks=("out-of-memory",),
    ),
]

BOARD = board(
    "job",
    "Job",
    "Memory of a job's ranks on all machines.",
    [machine(several=True), job()],
    ("Overview", GLANCE),
    ("Memory", MEMORY),
    ("Causes", CAUSES),
    ("Details", DETAIL),
    marks=[
        flushes(FLEET),
        Marks(
            "Out of memory", "orange", f"sum by ({OWN}) ({NEW_OOMS}) > 0", "rank {{rank}} (pid {{pid}}) on {{instance}}"
        ),
    ],
)
