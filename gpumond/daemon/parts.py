"""The parts of a Daemon that its tick and its requests share."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from contextlib import suppress
from math import inf

from gpumond.alerting.outbox import Outbox
from gpumond.alerting.silences import Silences
from gpumond.api.event_log import EventLog
from gpumond.baselines.service import BaselineService
from gpumond.config import Compat, Settings
from gpumond.config.quota_registry import QuotaRegistry
from gpumond.config.rule_registry import RuleRegistry
from gpumond.daemon.edges import Edges
from gpumond.diagnosis import Diagnosis
from gpumond.engine import EngineState
from gpumond.engine.preview import PreviewWindow
from gpumond.errors import StoreUnavailable
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
        self._rendering = asyncio.Lock()
        self._swapped = asyncio.Event()

    def swap(self, frame: Frame) -> None:
        """Make ``frame`` the current one."""
        self.frame, self.answers = frame, {}
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
        async with self._rendering:
            return await in_slices(self.exposition.rendering(self.frame, form))


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
            keep=self._keep,
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

    def gpu_processes(self) -> Mapping[ProcessKey, float | None] | None:
        """Return the processes that the driver lists in the current frame; None before the first one.

        Each with its idle time in seconds, None if the driver does not report its use of one of its devices.
        """
        if self.current.frame is None:
            return None
        found: dict[ProcessKey, float | None] = {}
        for device in self.current.frame.snapshot.devices:
            for key, process in device.processes_by_key.items():
                idle, other = process.idle_seconds, found.get(key, inf)
                found[key] = None if idle is None or other is None else min(idle, other)
        return found

    async def _read_driver(self) -> Reading | None:
        return await self.edges.collector.read(wait=FLUSH_READ_SECONDS)

    async def _keep(self, receipt: Receipt) -> None:
        """Store the receipt of an engine that was returned to service. The store has logged it if it cannot."""
        with suppress(StoreUnavailable):
            detail = {"engine": receipt.workload, "outcome": receipt.outcome, "reason": receipt.reason}
            await self.store.audit(receipt.requested_by, "engine.returned", detail)
            await self.store.add_receipts([receipt])

    def _flushed(self, receipt: Receipt) -> None:
        self.telemetry.flushed(receipt)
        self.events.flushed(receipt)
        self.baselines.flushed(receipt)
