"""Daemon: is gpumond itself well?"""

from __future__ import annotations

from grafana.frames import board, machine
from grafana.parts import ALL_WELL, ANY, BAD, PER_SECOND, WARNING, Column, Query, figure, listing, series
from grafana.queries import FLEET, quantile

SCRAPED = f'{{job="gpumond", {FLEET}}}'


def of(name: str, more: str = "") -> str:
    return f"gpumond_{name}{{{FLEET}{more}}}"


def a_minute(name: str, by: str) -> str:
    return f"sum by ({by}) (rate({of(name)}[$__rate_interval])) * 60"


def lately(name: str) -> str:
    return f"sum(increase({of(name)}[$__range]))"


GLANCE = [
    figure(
        "Daemons up",
        "Daemons that Prometheus can scrape, of those that it should, as the job gpumond.",
        "percentunit",
        f"avg(up{SCRAPED})",
        levels=ALL_WELL,
        below=BAD,
        runbooks=("daemon-down",),
    ),
    figure(
        "Oldest reading",
        "Age of the facts that the slowest daemon shows.",
        "s",
        f"max(time() - {of('snapshot_timestamp_seconds')})",
        levels=((30, WARNING), (60, BAD)),
        runbooks=("readings-stale",),
    ),
    figure(
        "Driver",
        "Whether the devices of all machines can be read.",
        "short",
        f"min({of('driver_up')})",
        levels=ALL_WELL,
        below=BAD,
        text={"1": "up", "0": "down"},
        runbooks=("driver-down",),
    ),
    figure(
        "Driver's answers",
        "Whether a call of any machine's driver is overdue.",
        "short",
        f"min({of('driver_responsive')})",
        levels=ALL_WELL,
        below=BAD,
        text={"1": "in time", "0": "overdue"},
        runbooks=("driver-unresponsive",),
    ),
    figure(
        "Store",
        "Whether changes and alerts can be kept on disk, on all machines.",
        "short",
        f"min({of('store_writable')})",
        levels=ALL_WELL,
        below=BAD,
        text={"1": "writable", "0": "not writable"},
        runbooks=("store-not-writable",),
    ),
    figure(
        "Ticks skipped",
        "Ticks left out in the time shown, since the one before took too long.",
        "short",
        lately("ticks_skipped_total"),
        levels=((1, WARNING), (60, BAD)),
    ),
    figure(
        "Driver restarts",
        "Starts of the driver's process after the first, in the time shown: its library crashed or hung.",
        "short",
        lately("collector_restarts_total"),
        levels=ANY,
        runbooks=("driver-unresponsive",),
    ),
    figure(
        "Series dropped",
        "Series left out of pages in the time shown, since these would have had too many.",
        "short",
        lately("series_dropped_total"),
        levels=ANY,
    ),
]

WORK = [
    series(
        "How long a tick takes",
        "Reading, attribution, rules: half of the ticks, and 99 of 100, take less.",
        "s",
        Query(quantile(0.5, "gpumond_tick_duration_seconds", FLEET), "{{instance}} half"),
        Query(quantile(0.99, "gpumond_tick_duration_seconds", FLEET), "{{instance}} 99 %"),
    ),
    series(
        "Ticks",
        "Ticks a second, and those left out.",
        PER_SECOND,
        Query(f"sum by (instance) (rate({of('tick_duration_seconds_count')}[$__rate_interval]))", "{{instance}} done"),
        Query(f"sum by (instance) (rate({of('ticks_skipped_total')}[$__rate_interval]))", "{{instance}} skipped"),
    ),
    series(
        "Age of readings",
        "How old the facts are that each daemon shows.",
        "s",
        Query(f"time() - max by (instance) ({of('snapshot_timestamp_seconds')})", "{{instance}}"),
        runbooks=("readings-stale",),
    ),
    series(
        "Scrapes take",
        "How long Prometheus waits for a page.",
        "s",
        Query(f"max by (instance) (scrape_duration_seconds{SCRAPED})", "{{instance}}"),
    ),
    series(
        "Series",
        "Series of a page; at most 50,000.",
        "short",
        Query(f"max by (instance) (scrape_samples_scraped{SCRAPED})", "{{instance}}"),
    ),
    series(
        "Faults",
        "Facts that could not be read, a minute, each counted when it begins; why is in the name.",
        "short",
        Query(a_minute("faults_total", "source, kind"), "{{source}} {{kind}}"),
    ),
]

AGENTS = [
    series(
        "Agents",
        "Programs whose agent is connected, by workload.",
        "short",
        Query(f"sum by (workload) ({of('agents')})", "{{workload}}"),
        stacked=True,
    ),
    series(
        "Oldest report",
        "Age of the oldest agent's report; after 15 s it counts no more.",
        "s",
        Query(f"max by (instance) ({of('agent_report_age_seconds')})", "{{instance}}"),
        runbooks=("agent-gone",),
    ),
    series(
        "Agents refused",
        "Connections and frames of agents that were refused, a minute; why is in the name.",
        "short",
        Query(a_minute("agent_rejects_total", "reason"), "{{reason}}"),
    ),
]

DONE = [
    series(
        "Events",
        "What happened, by kind, a minute.",
        "short",
        Query(a_minute("events_total", "kind"), "{{kind}}"),
    ),
    series(
        "Flushes",
        "Receipts by outcome, a minute.",
        "short",
        Query(a_minute("flushes_total", "outcome"), "{{outcome}}"),
    ),
    series(
        "What flushes returned",
        "Bytes that flushes returned, of those that they had predicted.",
        "percentunit",
        Query(
            f"sum by (instance) (increase({of('flush_released_bytes_total')}[$__range])) / "
            f"(sum by (instance) (increase({of('flush_expected_bytes_total')}[$__range])) > 0)",
            "{{instance}}",
        ),
    ),
    series(
        "Notifications",
        "Messages sent to receivers, and those that they did not take, a minute.",
        "short",
        Query(a_minute("notifications_total", "notifier"), "{{notifier}}"),
        Query(a_minute("notifications_failed_total", "notifier, reason"), "{{notifier}} failed: {{reason}}"),
        height=9,
    ),
    listing(
        "Versions",
        "Of each daemon, its Python, the driver and the newest CUDA that it serves.",
        (
            Column("instance", "Machine"),
            Column("version", "gpumond"),
            Column("python", "Python"),
            Column("source", "Source"),
            Column("driver_version", "Driver"),
            Column("cuda_version", "CUDA"),
        ),
        Query(
            f"max by (instance, version, python, source, driver_version, cuda_version) ({of('build_info')} "
            "* on (job, instance) group_left (source, driver_version, cuda_version) gpumond_driver_info)",
            "Runs",
        ),
        sort="Machine",
        ascending=True,
        width=10,
    ),
    listing(
        "Drivers",
        "Whether the devices can be read, and if not why; whether the daemon has pids of its own.",
        (Column("instance", "Machine"), Column("reason", "Reason")),
        Query(f"max by (instance, reason) ({of('driver_up')})", "Up"),
        sort="Machine",
        ascending=True,
        width=6,
        runbooks=("driver-down",),
    ),
]

BOARD = board(
    "daemon",
    "Daemon",
    "Is gpumond itself well?",
    [machine(several=True)],
    ("At a glance", GLANCE),
    ("Its work", WORK),
    ("Programs that report", AGENTS),
    ("What it did", DONE),
)
