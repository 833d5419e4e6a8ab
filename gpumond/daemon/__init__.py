"""Wiring and lifetimes: the only file that knows everything.

Once a second: ask the collector, take the agents' reports, conclude, swap one reference. Every
reader gets that Frame; none of them waits for anything else.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from hashlib import sha256
from operator import attrgetter
from typing import Any

from gpumond.agents.commands import AgentCommands
from gpumond.agents.connection import Limits
from gpumond.agents.server import AgentServer
from gpumond.alerting.dispatcher import AlertDispatcher
from gpumond.alerting.outbox import Outbox
from gpumond.alerting.receivers import Notifier, notifier
from gpumond.api.event_log import EventLog
from gpumond.baselines.service import BaselineService
from gpumond.collector.supervisor import Collector
from gpumond.config import RELOADED, Settings
from gpumond.config.rule_registry import RuleRegistry
from gpumond.diagnosis import Diagnosis
from gpumond.engine import EngineState, advancing, observing
from gpumond.engine.preview import Preview, PreviewWindow, previewing
from gpumond.errors import ConfigError, FlushError, StoreUnavailable
from gpumond.flush import Flusher, FlushOutcome, FlushRequest
from gpumond.history import History
from gpumond.host.event_loop import in_slices
from gpumond.host.fd_limits import kept_from_agents
from gpumond.host.peer_credentials import in_private_pid_namespace
from gpumond.host.runtime_directory import bind_agent_socket, remove_agent_socket
from gpumond.metrics import Compat, Exposition, Form, Page
from gpumond.metrics.scrape_schedule import ScrapeSchedule
from gpumond.metrics.telemetry import Telemetry
from gpumond.model.frame import Alert, Frame
from gpumond.model.pools import Receipt
from gpumond.model.snapshot import Reading
from gpumond.model.units import human
from gpumond.protocol.messages import AgentResponse, Asked
from gpumond.rules import Rule
from gpumond.rules.restore import awaited
from gpumond.store import Bounds, Store
from gpumond.store.audit_chain import AuditEntry
from gpumond.store.codecs import to_text
from gpumond.store.history import HistoryPersistence

log = logging.getLogger(__name__)

FLUSH_READ_SECONDS = 2.0
STORE_SECONDS = 2.0
"""An end of the daemon waits so long for a disk that hangs."""
RELEASE_SECONDS = 120.0
COLLECT_SECONDS = 10.0
"""A tick makes thousands of values that live until the next and are in no cycle: the garbage collector looks at them
so often, between two ticks, and not in the middle of one."""
COLLECT_SHARE = 0.005
"""Of the time, at most."""
COLLECTIONS = 30
"""Of so many one looks at everything, with a thousand programs for 30 ms; the others at what is new."""

PREVIEW_SHARE = 0.5
"""Of the time, while a preview is computed."""
AUDITED_PIDS = 100
"""An audit entry of a flush names so many at most."""

Load = Callable[[], Settings]


class Daemon:
    """One machine's devices and programs. ``source`` names an entry of ``sources.SOURCES``.

    ``load`` reads the configuration again, for ``reload``. ``pace``: as the Diagnosis takes it.
    """

    def __init__(self, settings: Settings, source: str, load: Load | None = None, pace: float = 1.0) -> None:
        self._store = Store(settings.store_file(), Bounds(settings.retention))
        receivers = settings.receiver_names()
        self.rulebook = RuleRegistry(settings.built_in_rules(), settings.own_rules(), self._store, receivers)
        self._load = load
        self._hour = PreviewWindow()
        self._previewing = asyncio.Lock()
        self._keeper = HistoryPersistence(self._store)
        self.baselines = BaselineService(self._store)
        self._private_pid_namespace = in_private_pid_namespace()
        self.started_at = time.time()
        self.frame: Frame | None = None
        self.answers: dict[str, bytes] = {}
        self._settings = settings
        self._memory = EngineState(diagnosis=Diagnosis(pace))
        self._wake = asyncio.Event()
        self._telemetry = Telemetry()
        self.http_rejected, self.log_dropped = self._telemetry.http_rejected, self._telemetry.log_dropped
        self.events = EventLog(self.started_at)
        self._outbox = Outbox(_notifiers(settings), self._store, self._telemetry, wants=self._wants)
        self._exposition = Exposition(self._telemetry, settings.compat)
        self._rendering = asyncio.Lock()
        self._scrapes: ScrapeSchedule[Form] = ScrapeSchedule()
        self._collector = Collector(source, restarted=self._telemetry.restarted, opened=self._wake.set)
        path = settings.agent_socket()
        mode = settings.agent_socket_mode()
        limits = Limits(reserved_descriptors=kept_from_agents())
        self._intake = AgentServer(
            bind_agent_socket(path, mode, settings.runtime_directory()),
            limits=limits,
            reported=self._telemetry.reported,
            rejected=self._telemetry.rejected,
        )
        self._flusher = Flusher(
            self._intake,
            self._read_driver,
            done=self._flushed,
            cooldown_seconds=settings.flush_cooldown,
        )

    async def tick(self) -> None:
        interval = self._settings.interval
        reading = await self._collector.read(wait=0.8 * interval)
        with self._telemetry.tick_duration.time():
            previous = self.frame.snapshot if self.frame else None
            reports = await in_slices(self._intake.reporting())
            snapshot = await in_slices(
                observing(
                    previous,
                    self._collector.state,
                    reading,
                    reports,
                    time.time(),
                    time.monotonic() - self._began,
                    self._store.writable,
                    self._store.faults(),
                    self._private_pid_namespace,
                    self._intake.ends(),
                )
            )
            rules = self.rulebook.rules
            tick = await in_slices(advancing(self._memory, rules, snapshot))
            alerts = self._consequences.follow(
                rules, tick.frame.alerts, snapshot, tick.memory.activities, tick.resolved
            )
            self._memory = tick.memory
            await self._show(replace(tick.frame, alerts=alerts))
            self.baselines.see(tick.frame)
            self._telemetry.workloads.connected(report.workload for report in snapshot.reports if report.uses_device)
            await asyncio.sleep(0)
            departed = self._intake.departed()
            self._telemetry.happened(self.events.follow(tick.frame, tick.raised, tick.resolved, departed))
        await in_slices(self._hour.adding(tick.frame))
        self._keeper.turn(self.history, snapshot.elapsed_seconds)
        self._telemetry.faults(snapshot.faults, complete=reading is not None)
        self._telemetry.store_writable.set(self._store.writable)

    async def _show(self, frame: Frame) -> None:
        """Swaps the one reference, when the pages that will be scraped of it are written."""
        expected = tuple(self._scrapes.expected(time.monotonic(), self._settings.interval))
        pages = {form: await in_slices(self._exposition.writing(frame, form)) for form in expected}
        self.frame, self.answers = frame, {}
        self._exposition.show(frame, pages)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self._began = time.monotonic()
        gc.freeze()
        gc.disable()
        await self._store.open()
        await self._resume()
        self._collector.start()
        self._intake.serve()
        ticking = asyncio.create_task(self._tick_forever())
        try:
            yield
        finally:
            ticking.cancel()
            self._intake.close()
            remove_agent_socket(self._settings.agent_socket())
            await self._collector.stop()
            keeping = asyncio.ensure_future(self._keeper.close(self.history))
            kept, _ = await asyncio.wait({keeping}, timeout=STORE_SECONDS)
            await self._outbox.close()
            await self._store.close(STORE_SECONDS if kept else 0.0)

    async def _resume(self) -> None:
        """What the daemon before left."""
        self._consequences = AlertDispatcher(self._store, self._outbox, self.flush, self._began)
        activities = await self._consequences.resume()
        self._memory = EngineState(activities, awaited=awaited(activities), diagnosis=self._memory.diagnosis)
        await self._keeper.restore(self.history)
        await self._outbox.open()
        try:
            self._flusher.receipts.extend(await self._store.receipts())
            await self._load_rules()
        except StoreUnavailable:
            pass  # it was said; the rules are loaded when the store can be read

    def receipts(self) -> Sequence[Receipt]:
        return tuple(self._flusher.receipts)

    @property
    def history(self) -> History:
        return self._memory.diagnosis.history

    def past_alerts(self) -> Sequence[Alert]:
        return tuple(self._consequences.past)

    async def audit_entries(self, limit: int) -> list[AuditEntry]:
        return await self._store.audit_entries(limit)

    async def preview(self, rule: Rule) -> Preview:
        async with self._previewing:
            return await in_slices(previewing(rule, self._hour.moments()), PREVIEW_SHARE)

    async def reload(self, requested_by: str) -> str:
        """What became of it, in a sentence. Raises ConfigError; what held then still holds."""
        try:
            if self._load is None:
                raise ConfigError("this daemon was started without a configuration that could be read again")
            settings = await asyncio.to_thread(self._load)
        except ConfigError as error:
            log.error("the configuration is wrong, the one before holds: %s", error)
            raise
        later = self._settings.differs(settings)
        self._settings = self._settings.model_copy(update={name: getattr(settings, name) for name in RELOADED})
        self.rulebook.configure(settings.built_in_rules(), settings.own_rules(), settings.receiver_names())
        self._exposition.also = settings.compat
        self._flusher.cooldown_seconds = settings.flush_cooldown
        self._store.bounds = Bounds(settings.retention)
        await self._outbox.configure(_notifiers(settings))
        said = f"reloaded; {len(self.rulebook.rules)} rules" + (
            f"; needs a restart: {', '.join(later)}" if later else ""
        )
        log.info("configuration %s, by %s", said, requested_by)
        try:
            await self._store.audit(requested_by, "reload", {"rules": len(settings.rules), "needs_restart": later})
        except StoreUnavailable as error:
            log.error("a reload is not in the audit: %s", error)
        return said

    def reload_on_signal(self) -> None:
        """SIGHUP."""
        self._reloading = asyncio.ensure_future(self._reload_quietly())

    async def _reload_quietly(self) -> None:
        try:
            await self.reload("SIGHUP")
        except ConfigError:
            pass  # reload has said so

    async def _load_rules(self) -> None:
        """The rules that the store keeps, as soon as it can be read."""
        left_out = await self.rulebook.load()
        self._store.left_out("rules", len(left_out))
        for wrong in left_out:
            log.error("a rule of the store is left out: %s", wrong)

    async def metrics(self, accept: str, compat: Compat | None = None) -> Page:
        form = Form.of(accept, compat)
        self._scrapes.asked(form, time.monotonic())
        if page := self._exposition.written(self.frame, form):
            return page
        async with self._rendering:
            return await in_slices(self._exposition.rendering(self.frame, form))

    async def flush(self, request: FlushRequest, requested_by: str) -> FlushOutcome:
        kind = "plan" if request.dry_run else "forced flush" if request.force else "flush"
        said = f"{kind} of {request.target}, steps {','.join(request.steps)}, by {requested_by}"
        if not request.dry_run:
            asked = {"target": str(request.target), "steps": request.steps}
            forced = {"force": True} if request.force else {}
            await self._store.audit(requested_by, "flush.request", asked | forced)
        try:
            answer = await self._flusher.flush(request, requested_by)
        except FlushError as error:
            log.info("%s: refused: %s", said, error)
            if not request.dry_run:
                await self._note(requested_by, "flush.refused", str(error))
            raise
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in Counter(map(_outcome, answer.receipts)).items())
        returned = "" if request.dry_run else f"; {human(answer.released_bytes)} came back"
        log.info("%s: %s%s", said, outcomes, returned)
        if not request.dry_run:
            await self._note(requested_by, "flush.receipts", _proof(answer), answer.receipts)
        self._wake.set()  # the next frame shows what the flush did
        return answer

    def _flushed(self, receipt: Receipt) -> None:
        self._telemetry.flushed(receipt)
        self.events.flushed(receipt)
        self.baselines.flushed(receipt)

    async def ask(
        self, pid: int, kind: Asked, limit_bytes: int | None, device: str | None, requested_by: str
    ) -> AgentResponse | None:
        return await AgentCommands(self._intake, self._store.audit, self._note).ask(
            pid, kind, limit_bytes, device, requested_by
        )

    async def release(self, seconds: float, requested_by: str) -> tuple[float, bool]:
        """Until when the driver is let go of, and whether it is really free."""
        await self._store.audit(requested_by, "release", {"for_seconds": seconds})
        return await self._release(seconds, requested_by)

    def release_for_maintenance(self) -> None:
        """SIGUSR1, for driver upgrade hooks that cannot speak HTTP."""
        self._releasing = asyncio.ensure_future(self._release(RELEASE_SECONDS, "SIGUSR1"))

    async def _release(self, seconds: float, requested_by: str) -> tuple[float, bool]:
        log.info("driver released for %g s by %s", seconds, requested_by)
        until = time.time() + seconds
        return until, await self._collector.release(seconds)

    async def _note(self, actor: str, action: str, detail: Any, receipts: Sequence[Receipt] = ()) -> None:
        """What is done is done, whether or not it can be written down; the store says loudly when it cannot."""
        try:
            await self._store.audit(actor, action, detail)
            await self._store.add_receipts(receipts)
        except StoreUnavailable:
            pass

    def _wants(self, receiver: str, rule: str) -> bool:
        """Receivers that a rule names and that are no longer there must not make its alerts silent."""
        named = next((each.receivers for each in self.rulebook.rules if each.name == rule), ())
        return receiver in named or not set(named) & set(self._settings.receiver_names())

    async def _read_driver(self) -> Reading | None:
        return await self._collector.read(wait=FLUSH_READ_SECONDS)

    async def _tick_forever(self) -> None:
        """Ticks on a monotonic schedule; one that comes too late is skipped and counted, never queued."""
        due = time.monotonic()
        collect_at, collections = due + COLLECT_SECONDS, 1
        while True:
            self._wake.clear()
            try:
                if self._store.writable and not self.rulebook.loaded:
                    await self._load_rules()
                await self.tick()
            except Exception:
                log.exception("a tick failed; the frame before it stays")
            began = time.monotonic()
            if began >= collect_at:
                await asyncio.sleep(0)
                gc.collect(0 if collections % COLLECTIONS else 2)
                collections += 1
                took = time.monotonic() - began
                collect_at = began + max(COLLECT_SECONDS, took / COLLECT_SHARE)
            interval = self._settings.interval
            due += interval
            late = time.monotonic() - due
            if late > 0:
                skipped = int(late // interval) + 1
                self._telemetry.ticks_skipped.inc(skipped)
                due += skipped * interval
            try:
                await asyncio.wait_for(self._wake.wait(), max(0.0, due - time.monotonic()))
                due = time.monotonic()
            except asyncio.TimeoutError:
                pass


def _notifiers(settings: Settings) -> list[Notifier]:
    return [notifier(each.receiver()) for each in settings.receivers]


_outcome = attrgetter("outcome")


def _proof(answer: FlushOutcome) -> dict[str, Any]:
    """A flush in the audit: totals, and the SHA-256 of the receipts as the store keeps them, one a line."""
    text = "".join(f"{to_text(receipt)}\n" for receipt in answer.receipts)
    return {
        "id": answer.id,
        "released_bytes": answer.released_bytes,
        "receipts": len(answer.receipts),
        "outcomes": dict(Counter(receipt.outcome for receipt in answer.receipts)),
        "pids": sorted({receipt.pid for receipt in answer.receipts})[:AUDITED_PIDS],
        "sha256": sha256(text.encode()).hexdigest(),
    }
