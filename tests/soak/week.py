"""Days of simulated time in minutes: errors, alerts, and the resources of the process."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import linear_regression, median

from bench.scrape import rss
from tests.helpers.simulated_daemon import SCRAPE_SECONDS, SimulatedDaemon
from tests.helpers.world import TICK_SECONDS, World
from tests.soak.incidents import Oracle, troubles

STORE_BYTES = 8 * 1024**2
"""Little enough to be reached within the first day."""
COLLECT_EVERY = 100
HOUR, DAY = 3600.0, 86400.0
WARM_UP_SECONDS = 3 * HOUR
FULL_SECONDS = DAY
"""Time until the longest series of the history is full; the bounded caches of labels are full within another day."""


@dataclass
class ResourceHistory:
    """Resources of the process at every simulated hour."""

    days: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    store: list[int] = field(default_factory=list)
    log: list[int] = field(default_factory=list)
    """SQLite's write-ahead log of the store."""
    tick_seconds: list[float] = field(default_factory=list)

    def after(self, seconds: float) -> int | None:
        """Return the index of the first measurement at this time or later, if another one follows it."""
        return next((i for i, day in enumerate(self.days[:-1]) if day * DAY >= seconds), None)

    def measure(self, daemon: SimulatedDaemon, ticks: Sequence[float]) -> None:
        gc.collect()
        self.days.append(daemon.world.elapsed / DAY)
        self.memory.append(rss(os.getpid()))
        self.descriptors.append(len(os.listdir("/proc/self/fd")))
        self.threads.append(threading.active_count())
        self.store.append(daemon.store.path.stat().st_size)
        self.log.append(daemon.store.path.with_name("gpumond.db-wal").stat().st_size)
        self.tick_seconds.append(median(ticks))


def run_week(
    directory: Path, days: float, store_bytes: int = STORE_BYTES, seed: int = 1, churn: int = 1
) -> dict[str, object]:
    """Return the figures of these days. Raises AssertionError if a notification is missing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    gc.freeze()
    gc.disable()
    try:
        return asyncio.run(_live(directory, World(seed, churn), store_bytes, days, hard))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        gc.enable()


async def _live(directory: Path, world: World, store_bytes: int, days: float, most: int) -> dict[str, object]:
    daemon, oracle, resources = SimulatedDaemon(directory, world, store_bytes), Oracle(), ResourceHistory()
    trouble = troubles(world, oracle)
    ticks: list[float] = []
    began = time.monotonic()
    async with daemon.started():
        for number in range(int(days * DAY / TICK_SECONDS)):
            world.advance()
            oracle.now = world.elapsed
            next(trouble)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 if world.disk_full else most, most))
            before = time.perf_counter()
            tick = await daemon.tick()
            ticks.append(time.perf_counter() - before)
            oracle.check(world.elapsed, tick.raised, tick.resolved)
            await daemon.edit()
            await daemon.edit()
            if number % COLLECT_EVERY == 0:
                gc.collect()
            if world.elapsed % HOUR < TICK_SECONDS:
                resources.measure(daemon, ticks)
                ticks.clear()
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        world.receiver_down = world.disk_full = False
        await asyncio.wait_for(daemon.settled(), 60)
    return _figures(days, daemon, oracle, resources) | {"seconds": round(time.monotonic() - began)}


def _figures(days: float, daemon: SimulatedDaemon, oracle: Oracle, resources: ResourceHistory) -> dict[str, object]:
    warm = resources.after(WARM_UP_SECONDS)
    full = resources.after(FULL_SECONDS)
    slope = None if full is None else linear_regression(resources.days[full:], resources.memory[full:]).slope
    warm = len(resources.days) - 1 if warm is None else warm
    return {
        "simulated_days": days,
        "tick_every_s": TICK_SECONDS,
        "scraped_every_s": SCRAPE_SECONDS,
        "ticks": int(days * DAY / TICK_SECONDS),
        "programs": daemon.world.programs,
        "rule_edits": daemon.edits,
        "rule_edits_refused_while_the_disk_was_full": daemon.refused_edits,
        "alerts_expected": oracle.expected,
        "alerts_not_due_at_the_end": oracle.awaited,
        "alerts_raised": daemon.raised["raised"],
        "alerts_sent": daemon.receiver.received["raised"],
        "wrong": oracle.wrong[:20],
        "rss_mib_after_3_hours": round(resources.memory[warm] / 2**20, 1),
        "rss_mib_after_1_day": None if full is None else round(resources.memory[full] / 2**20, 1),
        "rss_mib_at_the_end": round(resources.memory[-1] / 2**20, 1),
        "rss_mib_a_day_after_the_first": None if slope is None else round(slope / 2**20, 2),
        "descriptors_more": resources.descriptors[-1] - resources.descriptors[warm],
        "threads_more": resources.threads[-1] - resources.threads[warm],
        "store_bound_mib": daemon.store.limits.max_bytes / 2**20,
        "store_mib_at_most": round(max(resources.store) / 2**20, 2),
        "store_log_mib_at_most": round(max(resources.log) / 2**20, 2),
        "tick_p50_ms_first_and_last_hour": [round(1e3 * resources.tick_seconds[i], 2) for i in (warm, -1)],
        "page_bytes": daemon.page_bytes,
    }
