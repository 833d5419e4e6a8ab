"""The daemon: its parts, their lifetimes, and the view of it that the API reads.

``edges`` contains all I/O, ``tick`` the work of each interval, and ``requests`` the changes that users
and programs request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress

from gpumond.config.loading import Kept
from gpumond.config.settings import Settings
from gpumond.daemon.kernel import Edges, Parts, real_edges
from gpumond.daemon.requests import Load as Load, Requests
from gpumond.daemon.tick import Ticker
from gpumond.devices.child.process import Worker
from gpumond.facts.errors import StoreUnavailable
from gpumond.facts.frame import Alert, Frame
from gpumond.facts.pools import Receipt
from gpumond.facts.rule import Rule
from gpumond.facts.snapshot import Fault
from gpumond.features.alerts.dispatcher import AlertDispatcher
from gpumond.features.flush.hook import AlertmanagerHook
from gpumond.features.quotas.admissions import Admissions
from gpumond.features.quotas.limits import QuotaLimits
from gpumond.features.rules.preview import Preview, preview
from gpumond.features.rules.restore import awaited
from gpumond.host.event_loop import background
from gpumond.host.machine import find_process
from gpumond.store.audit import AuditEntry
from gpumond.store.history import HistoryPersistence
from gpumond.tick.history import History
from gpumond.tick.observe import EngineState, Tick

log = logging.getLogger(__name__)

STORE_SECONDS = 2.0
"""The time that the end of a daemon waits for a disk that hangs."""


@contextmanager
def make_daemon(
    settings: Settings,
    source: str,
    load: Load | None = None,
    pace: float = 1.0,
    worker: Worker | None = None,
    kept: Kept | None = None,
) -> Iterator[Daemon]:
    """A Daemon with its real edges. Raises ConfigError if the agents' socket cannot be bound."""
    with real_edges(settings, source, worker) as edges:
        yield Daemon(settings, edges, load, pace, kept)


class Daemon:
    """The devices and programs of one machine.

    ``load`` reads the configuration again, for a reload. ``pace`` is the factor by which diagnosis time is
    accelerated. Construct it on the event loop's thread.
    """

    def __init__(
        self,
        settings: Settings,
        edges: Edges,
        load: Load | None = None,
        pace: float = 1.0,
        kept: Kept | None = None,
    ) -> None:
        parts = self._parts = Parts(settings, edges, pace)
        if kept is None:
            parts.telemetry.configuration_loaded()
        else:
            log.error("the configuration is invalid, its last valid content is in effect: %s", kept.error)
            edges.faults["configuration"] = Fault("configuration", "not_loaded", None, kept.place)
            parts.telemetry.configuration_failed(kept.loaded_at)
        self._requests = Requests(parts, load)
        self._dispatcher = AlertDispatcher(
            parts.store, parts.outbox, self._requests.flush, parts.began, self._requests.request_end
        )
        self._history_persistence = HistoryPersistence(parts.store)
        self._quota_limits = QuotaLimits(self._requests.set_limit)
        self.admissions = Admissions(
            self._requests.flush,
            lambda: parts.settings.lending,
            find_process,
            edges.clock.monotonic,
            parts.store.admission_rows,
        )
        self.hook = AlertmanagerHook(
            self._requests.flush,
            parts.store,
            parts.machine_names,
            lambda: parts.settings.hook_dry_run,
        )
        effects = (self._dispatcher, self._quota_limits, self.admissions)
        self._ticker = Ticker(parts, self._history_persistence, *effects)
        self._store_seconds = STORE_SECONDS
        self.started_at, self.store_file = parts.started_at, parts.store.path.absolute()
        self.rulebook, self.events, self.baselines = parts.rulebook, parts.events, parts.baselines
        self.silences, self.quotas, self.faults = parts.silences, parts.quotas, edges.faults
        self.http_rejected, self.log_dropped = parts.telemetry.http_rejected, parts.telemetry.log_dropped
        self.metrics = parts.current.metrics
        self.flush, self.ask, self.fetch = self._requests.flush, self._requests.ask, self._requests.fetch
        self.test_receiver = self._requests.test_receiver
        self.release, self.release_on_signal = self._requests.release, self._requests.release_on_signal
        self.reload, self.reload_on_signal = self._requests.reload, self._requests.reload_on_signal

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run all parts, and tick once per interval."""
        async with self.started(), background(self._ticker.run_forever()):
            yield

    @asynccontextmanager
    async def started(self) -> AsyncIterator[None]:
        """Run all parts except the schedule: ``tick`` is left to the caller. At the end each part is closed, also
        if another one fails."""
        parts, edges = self._parts, self._parts.edges
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._close_store)
            await parts.store.open()
            stack.push_async_callback(parts.outbox.close)
            await self._resume()
            stack.push_async_callback(self._finish, self._close_history)
            stack.push_async_callback(self._finish, parts.baselines.close)
            stack.push_async_callback(edges.collector.stop)
            edges.collector.start()
            stack.callback(edges.agents.close)
            edges.agents.serve()
            stack.push_async_callback(self._finish, edges.engines.close)
            edges.engines.configure(parts.settings.engines)
            edges.engines.start(parts.gpu_processes)
            stack.push_async_callback(self._finish, parts.flusher.close)
            parts.flusher.resume()
            stack.push_async_callback(self._finish, self._dispatcher.close)
            stack.push_async_callback(self._finish, self._quota_limits.close)
            stack.push_async_callback(self._finish, self.admissions.close)
            stack.push_async_callback(self._finish, self._requests.close)
            stack.push_async_callback(self._finish, self._ticker.close)
            yield

    async def tick(self) -> Tick:
        """Carry out one tick and return it."""
        return await self._ticker.tick()

    async def _resume(self) -> None:
        """Load the state that the previous daemon stored."""
        parts = self._parts
        activities = await self._dispatcher.resume()
        await self.hook.resume()
        parts.state = EngineState(activities, awaited=awaited(activities), diagnosis=parts.state.diagnosis)
        await self._history_persistence.restore(self.history)
        with suppress(StoreUnavailable):  # the store has logged it; they are loaded when it can be read
            await self._ticker.load_silences()
        await parts.outbox.open()
        try:
            parts.flusher.receipts.extend(await parts.store.receipts())
            await self._ticker.load_rules()
            await self._ticker.load_admissions()
        except StoreUnavailable:
            pass  # the store has logged it; they are loaded when it can be read

    async def _close_history(self) -> None:
        await self._history_persistence.close(self.history)

    async def _close_store(self) -> None:
        await self._parts.store.close(self._store_seconds)

    async def _finish(self, work: Callable[[], Awaitable[None]]) -> None:
        """Wait for work that writes to the store. The first that takes too long ends the wait for all the others."""
        task = asyncio.ensure_future(work())
        done, _ = await asyncio.wait({task}, timeout=self._store_seconds)
        if not done:
            self._store_seconds = 0.0
            task.cancel()
        await asyncio.gather(task, return_exceptions=not done)

    @property
    def frame(self) -> Frame | None:
        return self._parts.current.frame

    async def await_frame(self, seconds: float) -> bool:
        return await self._parts.current.await_frame(seconds)

    @property
    def answers(self) -> dict[str, bytes]:
        return self._parts.current.answers

    @property
    def history(self) -> History:
        return self._parts.state.diagnosis.history

    def receipts(self) -> Sequence[Receipt]:
        return tuple(self._parts.flusher.receipts)

    def past_alerts(self) -> Sequence[Alert]:
        return tuple(self._dispatcher.past)

    async def audit_entries(self, limit: int) -> list[AuditEntry]:
        return await self._parts.store.audit_entries(limit)

    async def preview(self, rule: Rule) -> Preview:
        return await asyncio.to_thread(preview, rule, self._parts.preview_window.moments())
