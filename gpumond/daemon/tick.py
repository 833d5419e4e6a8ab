"""One tick: read, compute, publish, then act. It runs once per interval."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from gpumond.daemon.kernel import Parts
from gpumond.facts.snapshot import Reading, Snapshot
from gpumond.features.alerts.dispatcher import AlertDispatcher
from gpumond.features.instruments.inquiry import LeakInquiry
from gpumond.features.quotas.admissions import Admissions
from gpumond.features.quotas.limits import QuotaLimits
from gpumond.host.peer import person_of
from gpumond.quantities.device import short_users
from gpumond.store.history import HistoryPersistence
from gpumond.tick.observe import Tick, advance, observe

log = logging.getLogger(__name__)

READ_SHARE = 0.8
"""The share of an interval that a tick waits for a reading."""


class Ticker:
    def __init__(
        self,
        parts: Parts,
        history: HistoryPersistence,
        dispatcher: AlertDispatcher,
        quota_limits: QuotaLimits,
        admissions: Admissions,
    ) -> None:
        self._parts, self._dispatcher, self._history = parts, dispatcher, history
        self._quota_limits, self._admissions = quota_limits, admissions
        self._leaks = LeakInquiry(parts.edges.agents)

    async def tick(self) -> Tick:
        """Carry out one tick. The frame is swapped before receivers are notified and programs are flushed."""
        parts, interval = self._parts, self._parts.settings.interval
        reading = await parts.edges.collector.read(wait=READ_SHARE * interval)
        with parts.telemetry.tick_duration.time():
            snapshot = await self._observe(reading)
            parts.edges.agents.keep({each.process for each in snapshot.suspensions if each.confirmed})
            rules = parts.rulebook.rules
            tick = advance(parts.state, rules, snapshot)
            alerts = parts.silences.mark(tick.frame.alerts)

            # No other task runs from here to `execute`: it carries out what the frame shows.
            users = {} if parts.settings.lending == "all" else short_users(tick.memory.recent, snapshot)
            dispatch = self._dispatcher.decide(rules, alerts, snapshot, tick.memory.activities, tick.resolved, users)
            parts.state = tick.memory
            frame = replace(tick.frame, alerts=dispatch.alerts, silences=parts.silences.current())
            parts.current.swap(frame)
            self._dispatcher.execute(dispatch)
            if parts.quotas.loaded:  # until then, the limit of an unknown quota may be that of a stored one
                await self._quota_limits.execute(snapshot)
            self._admissions.execute(snapshot)
            self._leaks.consider(tick.frame)

            await self._record(tick)
        parts.preview_window.add(tick.frame)
        self._history.advance(tick.memory.diagnosis.history, snapshot.elapsed_seconds)
        parts.telemetry.faults(snapshot.faults, complete=reading is not None)
        parts.telemetry.store_writable.set(parts.store.writable)
        parts.telemetry.count_silences(map(parts.silences.state, parts.silences.current()))
        return tick

    async def _observe(self, reading: Reading | None) -> Snapshot:
        """Return the facts of this tick."""
        parts, edges = self._parts, self._parts.edges
        previous = parts.current.frame
        reports = edges.agents.reports()
        return observe(
            previous.snapshot if previous else None,
            edges.collector.state,
            reading,
            reports,
            taken_at=edges.clock.wall(),
            elapsed_seconds=edges.clock.monotonic() - parts.began,
            store_writable=edges.store.writable,
            faults=(*edges.store.faults(), *edges.faults.values()),
            private_pid_namespace=edges.private_pid_namespace,
            ends=edges.agents.ends(),
            silent=edges.agents.silent(),
            engines=edges.engines.readings(),
            uptime_seconds=edges.clock.uptime(),
            quotas=parts.quotas.table,
            person_of=person_of,
        )

    async def _record(self, tick: Tick) -> None:
        """Pass the frame to baselines, telemetry and events."""
        parts, snapshot = self._parts, tick.frame.snapshot
        parts.baselines.add(tick.frame)
        parts.telemetry.workloads.connected(report.workload for report in snapshot.reports if report.uses_device)
        await asyncio.sleep(0)
        departed = parts.edges.agents.departed()
        parts.telemetry.count_events(parts.events.publish(tick.frame, tick.raised, tick.resolved, departed))

    async def close(self) -> None:
        await self._leaks.close()

    async def run_forever(self) -> None:
        """Tick on a monotonic schedule. A tick that comes too late is skipped and counted, never queued."""
        parts = self._parts
        due = time.monotonic()
        while True:
            parts.edges.wake.clear()
            try:
                if parts.store.writable and not parts.silences.loaded:
                    await self.load_silences()
                if parts.store.writable and not (parts.rulebook.loaded and parts.quotas.loaded):
                    await self.load_rules()
                if parts.store.writable and not self._admissions.loaded:
                    await self.load_admissions()
                await self.tick()
            except Exception:
                log.exception("a tick failed; the previous frame remains")
            await asyncio.sleep(0)
            interval = parts.settings.interval
            due += interval
            late = time.monotonic() - due
            if late > 0:
                skipped = int(late // interval) + 1
                parts.telemetry.ticks_skipped.inc(skipped)
                due += skipped * interval
            try:
                await asyncio.wait_for(parts.edges.wake.wait(), max(0.0, due - time.monotonic()))
                due = time.monotonic()
            except asyncio.TimeoutError:
                pass

    async def load_rules(self) -> None:
        """Load the rules and quotas of the store. Logs each that is skipped; raises StoreUnavailable."""
        for table, registry in (("rules", self._parts.rulebook), ("quotas", self._parts.quotas)):
            await self._load(table, registry.load)

    async def load_admissions(self) -> None:
        """Load the requests for memory of the store. Raises StoreUnavailable."""
        await self._load("admissions", self._admissions.load)

    async def load_silences(self) -> None:
        """Load the silences of the store. Logs each one that is skipped; raises StoreUnavailable."""
        await self._load("silences", self._parts.silences.load)

    async def _load(self, table: str, load: Callable[[], Awaitable[Sequence[str]]]) -> None:
        left_out = await load()
        self._parts.store.left_out(table, len(left_out))
        for problem in left_out:
            log.error("a row of the table %s is skipped: %s", table, problem)
