"""The parts of a Daemon that its tick and its requests share."""

from __future__ import annotations

import asyncio
import socket

from gpumond.alerting.outbox import Outbox
from gpumond.alerting.silences import Silences
from gpumond.api.event_log import EventLog
from gpumond.baselines.service import BaselineService
from gpumond.config import Compat, Settings
from gpumond.config.quota_registry import QuotaRegistry
from gpumond.config.rule_registry import RuleRegistry
from gpumond.daemon.edges import Edges
from gpumond.daemon.scrape_schedule import ScrapeSchedule
from gpumond.diagnosis import Diagnosis
from gpumond.engine import EngineState
from gpumond.engine.preview import PreviewWindow
from gpumond.flush import Flusher
from gpumond.host.event_loop import in_slices
from gpumond.metrics import ALL_GROUPS, Exposition, Form, Group, Page
from gpumond.model.frame import Frame
from gpumond.model.pools import Receipt
from gpumond.model.process import ProcessKey
from gpumond.model.snapshot import Reading

FLUSH_READ_SECONDS = 2.0
FIRST_FRAME_SECONDS = 2.0
"""The longest that a scrape waits for the first frame: a page without devices would be a gap in each series."""


class CurrentFrame:
    """The frame that all readers use, and its metrics pages."""

    def __init__(self, edges: Edges, settings: Settings) -> None:
        self.frame: Frame | None = None
        self.answers: dict[str, bytes] = {}
        """Encoded answers of the API about this frame, by route."""
        self.exposition = Exposition(edges.telemetry, settings.compat)
        self._clock = edges.clock
        self._scrapes: ScrapeSchedule[Form] = ScrapeSchedule()
        self._rendering = asyncio.Lock()
        self._swapped = asyncio.Event()

    async def write_pages(self, frame: Frame, interval: float) -> dict[Form, Page]:
        """Return the pages that will probably be requested within ``interval`` seconds."""
        expected = tuple(self._scrapes.expected(self._clock.monotonic(), interval))
        return {form: await in_slices(self.exposition.writing(frame, form)) for form in expected}

    def swap(self, frame: Frame, pages: dict[Form, Page]) -> None:
        """Make ``frame`` the current one. ``pages`` show no annotation of an alert, so they may precede these."""
        self.frame, self.answers = frame, {}
        self.exposition.show(frame, pages)
        self._swapped.set()  # wakes current waiters; later ones wait for the next frame
        self._swapped = asyncio.Event()

    async def await_frame(self, seconds: float) -> bool:
        """Wait for the next frame. Returns False if none is taken in time."""
        try:
            await asyncio.wait_for(self._swapped.wait(), seconds)
        except asyncio.TimeoutError:
            return False
        return True

    async def metrics(self, accept: str, compat: Compat | None = None, groups: frozenset[Group] = ALL_GROUPS) -> Page:
        """Return the page of the current frame. The first scrapes after the start wait for the first frame."""
        if self.frame is None:
            await self.await_frame(FIRST_FRAME_SECONDS)
        form = Form.of(accept, compat, groups)
        if page := self.rendered(form):
            return page
        async with self._rendering:
            return await in_slices(self.exposition.rendering(self.frame, form))

    def rendered(self, form: Form) -> Page | None:
        """Return the page of the current frame, which a scraper requests; None if it has not been rendered."""
        self._scrapes.asked(form, self._clock.monotonic())
        return self.exposition.written(self.frame, form)


class Parts:
    """``settings`` are replaced by a reload; ``state`` is the engine's, replaced by each tick."""

    def __init__(self, settings: Settings, edges: Edges, pace: float) -> None:
        self.settings, self.edges = settings, edges
        self.telemetry, self.store = edges.telemetry, edges.store
        self.started_at, self.began = edges.clock.wall(), edges.clock.monotonic()
        self.state = EngineState(diagnosis=Diagnosis(pace))
        self.current = CurrentFrame(edges, settings)
        names = settings.receiver_names()
        self.rulebook = RuleRegistry(
            settings.built_in_rules(), settings.rules, self.store, names, settings.rule_overrides
        )
        self.silences = Silences(self.store, edges.clock.wall)
        self.quotas = QuotaRegistry(settings.quotas, self.store.quota_rows)
        self.baselines = BaselineService(self.store)
        self.events = EventLog(self.started_at)
        self.preview_window = PreviewWindow()
        self.outbox = Outbox(
            edges.receivers(settings),
            self.store,
            self.telemetry,
            wants=self._receives,
            silenced=lambda alert: bool(self.silences.silencing(alert)),
            backoff_seconds=edges.retry_seconds,
        )
        self.flusher = Flusher(
            edges.agents,
            self._read_driver,
            done=self._flushed,
            cooldown_seconds=settings.flush_cooldown,
            engines=edges.engines,
        )

    def _receives(self, receiver: str, rule: str) -> bool:
        """An alert of a rule whose receivers are all unknown is sent to every receiver."""
        named = next((each.receivers for each in self.rulebook.rules if each.name == rule), ())
        return receiver in named or not set(named) & set(self.settings.receiver_names())

    def machine_names(self) -> frozenset[str]:
        """Return the names of this machine that alerts may have as `instance`, in lower case."""
        own = socket.gethostname()
        listened = () if self.settings.loopback or self.settings.host in ("0.0.0.0", "::") else (self.settings.host,)
        return frozenset(name.lower() for name in (own, own.partition(".")[0], *self.settings.hosts, *listened))

    def gpu_processes(self) -> list[ProcessKey] | None:
        """Return the processes that the driver lists in the current frame; None before the first one."""
        if self.current.frame is None:
            return None
        return [key for device in self.current.frame.snapshot.devices for key in device.processes_by_key]

    async def _read_driver(self) -> Reading | None:
        return await self.edges.collector.read(wait=FLUSH_READ_SECONDS)

    def _flushed(self, receipt: Receipt) -> None:
        self.telemetry.flushed(receipt)
        self.events.flushed(receipt)
        self.baselines.flushed(receipt)
