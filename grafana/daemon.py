"""Daemon: is gpumond itself well?"""

from __future__ import annotations

from grafana.columns import MACHINE
from grafana.frames import board, machine
from grafana.parts import ALL_WELL, ANY, BAD, PER_SECOND, WARNING, YES, Column, Query, figure, listing, series
from grafana.queries import FLEET, TARGET, quantile

SCRAPED = f"gpumond:up{{{FLEET}}}"
"""Targets of Prometheus that are daemons, by a rule of deploy/prometheus."""


def of(name: str, more: str = "") -> str:
    return f"gpumond_{name}{{{FLEET}{more}}}"


def a_minute(name: str, by: str) -> str:
    return f"sum by ({by}) (rate({of(name)}[$__rate_interval])) * 60"


def lately(name: str) -> str:
    return f"sum(increase({of(name)}[$__range]))"


GLANCE = [
    figure(
        "Daemons up",
        "Daemons that Prometheus can scrape, out of all daemons that are targets.",
        "percentunit",
        f"avg({SCRAPED})",
        levels=ALL_WELL,
        below=BAD,
        runbooks=("daemon-down",),
    ),
    figure(
        "Oldest reading",
        "Age of the last reading of the slowest daemon.",
        "s",
        f"max(time() - {of('snapshot_timestamp_seconds')})",
        levels=((30, WARNING), (60, BAD)),
        runbooks=("readings-stale",),
    ),
    figure(
        "Driver",
        "Up if the devices of all machines that have one can be read.",
        "short",
        f"min({of('driver_up')})",
        levels=ALL_WELL,
        below=BAD,
        text={"1": "up", "0": "down"},
        runbooks=("driver-down",),
    ),
    figure(
        "Driver calls",
        "Unresponsive if a driver call on any machine is overdue.",
        "short",
        f"min({of('driver_responsive')})",
        levels=ALL_WELL,
        below=BAD,
        text={"1": "in time", "0": "overdue"},
        runbooks=("driver-unresponsive",),
    ),
    figure(
        "Store",
        "Writable if changes and alerts can be stored on disk on all machines.",
        "short",
        f"min({of('store_writable')})",
        levels=ALL_WELL,
        below=BAD,
        text={"1": "writable", "0": "not writable"},
        runbooks=("store-not-writable",),
    ),
    figure(
        "Ticks skipped",
        "Ticks skipped in the selected time range because the previous one took too long.",
        "short",
        lately("ticks_skipped_total"),
        levels=((1, WARNING), (60, BAD)),
    ),
    figure(
        "Driver restarts",
        "Restarts of the driver process in the selected time range, after its driver library crashed or hung.",
        "short",
        lately("collector_restarts_total"),
        levels=ANY,
        runbooks=("driver-unresponsive",),
    ),
    figure(
        "Series dropped",
        "Series dropped by the limit per scrape in the selected time range.",
        "short",
        lately("series_dropped_total"),
        levels=ANY,
    ),
]

WORK = [
    series(
        "Duration of a tick",
        "Duration of a tick: median and 99th percentile.",
        "s",
        Query(quantile(0.5, "gpumond_tick_duration_seconds", FLEET), "{{instance}} median"),
        Query(quantile(0.99, "gpumond_tick_duration_seconds", FLEET), "{{instance}} 99%"),
    ),
    series(
        "Ticks",
        "Ticks per second, and skipped ticks.",
        PER_SECOND,
        Query(f"sum by (instance) (rate({of('tick_duration_seconds_count')}[$__rate_interval]))", "{{instance}} done"),
        Query(f"sum by (instance) (rate({of('ticks_skipped_total')}[$__rate_interval]))", "{{instance}} skipped"),
    ),
    series(
        "Age of readings",
        "Age of the last reading of each daemon.",
        "s",
        Query(f"time() - max by (instance) ({of('snapshot_timestamp_seconds')})", "{{instance}}"),
        runbooks=("readings-stale",),
    ),
    series(
        "Scrape duration",
        "Duration of a scrape.",
        "s",
        Query(f"max by (instance) (scrape_duration_seconds and on ({TARGET}) {SCRAPED})", "{{instance}}"),
    ),
    series(
        "Series",
        "Series per scrape; the limit is 50,000.",
        "short",
        Query(f"max by (instance) (scrape_samples_scraped and on ({TARGET}) {SCRAPED})", "{{instance}}"),
        Query(f"0 * max(scrape_samples_scraped and on ({TARGET}) {SCRAPED}) + 50000", "limit"),
        limits=("limit",),
        colors={"limit": BAD},
    ),
    series(
        "Faults",
        "Faults per minute by kind, counted once when they start.",
        "short",
        Query(a_minute("faults_total", "source, kind"), "{{source}} {{kind}}"),
    ),
]

AGENTS = [
    series(
        "Agents",
        "Processes with a connected agent, by workload.",
        "short",
        Query(f"sum by (workload) ({of('agents')})", "{{workload}}"),
        stacked=True,
    ),
    series(
        "Oldest report",
        "Age of the oldest agent report; a report expires after 15 s.",
        "s",
        Query(f"max by (instance) ({of('agent_report_age_seconds')})", "{{instance}}"),
        runbooks=("agent-gone",),
    ),
    series(
        "Agents refused",
        "Rejected agent connections and messages per minute, by reason.",
        "short",
        Query(a_minute("agent_connections_rejected_total", "reason"), "{{reason}}"),
    ),
]

DONE = [
    series(
        "Events",
        "Events per minute, by kind.",
        "short",
        Query(a_minute("events_total", "kind"), "{{kind}}"),
    ),
    series(
        "Flushes",
        "Receipts per minute, by outcome.",
        "short",
        Query(a_minute("flushes_total", "outcome"), "{{outcome}}"),
    ),
    series(
        "Released, of what was expected",
        "Bytes that flushes released, as a fraction of the expected bytes.",
        "percentunit",
        Query(
            f"sum by (instance) (increase({of('flush_released_bytes_total')}[$__range])) / "
            f"(sum by (instance) (increase({of('flush_expected_bytes_total')}[$__range])) > 0)",
            "{{instance}}",
        ),
    ),
    series(
        "Notifications",
        "Notifications sent per minute, and those that couldn't be delivered.",
        "short",
        Query(a_minute("notifications_total", "receiver"), "{{receiver}}"),
        Query(a_minute("notifications_failed_total", "receiver, reason"), "{{receiver}} failed: {{reason}}"),
        height=9,
    ),
    listing(
        "Drivers",
        "State of the device source with the reason of a failure, and whether the daemon has a private PID namespace.",
        (MACHINE, Column("reason", "Reason")),
        Query(
            f"max by (instance, reason) ({of('driver_down_reason')}) * 0 "
            f"or on (instance) max by (instance) ({of('driver_up')})",
            "Up",
            text={"1": "up", "0": "down"},
        ),
        sort="Machine",
        ascending=True,
        width=16,
        runbooks=("driver-down",),
    ),
    listing(
        "Versions",
        "Each daemon's version, commit, configuration hash, rules hash and Python, and the driver with the latest CUDA "
        "version that it supports.",
        (
            MACHINE,
            Column("version", "gpumond"),
            Column("commit", "Commit"),
            Column("hash", "Configuration"),
            Column("rules_hash", "Rules"),
            Column("python", "Python"),
            Column("source", "Source"),
            Column("driver_version", "Driver"),
            Column("cuda_version", "CUDA"),
        ),
        Query(
            "max by (instance, version, commit, hash, rules_hash, python, source, driver_version, cuda_version) ("
            f'label_replace({of("build_info")}, "commit", "$1", "revision", "(.{{9}}).*") '
            f"* on ({TARGET}) group_left (source, driver_version, cuda_version) {of('driver_info')} "
            f"* on ({TARGET}) group_left (hash, rules_hash) ({of('config_info')} or on ({TARGET}) {of('build_info')}))",
            "Runs",
            text=YES,
        ),
        sort="Machine",
        ascending=True,
        width=24,
    ),
]

BOARD = board(
    "daemon",
    "Daemon",
    "Health of gpumond.",
    [machine(several=True)],
    ("Overview", GLANCE),
    ("Performance", WORK),
    ("Agents and their reports", AGENTS),
    ("Activity", DONE),
)
