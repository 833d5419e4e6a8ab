"""Wiring and lifetimes: the only file that knows everything.

Once a second: ask the collector, take the agents' reports, conclude, swap one reference. Every
reader gets that Frame; none of them waits for anything else.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

import uvicorn

from gpumond.api.app import create_app
from gpumond.api.auth import Tokens
from gpumond.collector import Collector
from gpumond.config import Settings
from gpumond.engine import Memory, advance, observe
from gpumond.errors import ConfigError
from gpumond.flush import FlushAnswer, Flusher, FlushRequest
from gpumond.intake import Intake
from gpumond.metrics import Compat, Exposition, Page
from gpumond.metrics.telemetry import Telemetry
from gpumond.model import Frame, Reading, Receipt
from gpumond.runtime import bind_agent_socket, leave_token

log = logging.getLogger(__name__)

FLUSH_READ_SECONDS = 2.0
RELEASE_SECONDS = 120.0
GC_THRESHOLD = 50_000
"""A tick makes thousands of values that live until the next and are in no cycle: not worth a look each time."""


class Daemon:
    """One machine's devices and programs. ``source`` names an entry of ``sources.SOURCES``."""

    def __init__(self, settings: Settings, source: str) -> None:
        self.rules = settings.active_rules()
        self.started_at = time.time()
        self.frame: Frame | None = None
        self._settings = settings
        self._memory = Memory()
        self._wake = asyncio.Event()
        self._telemetry = Telemetry()
        self._exposition = Exposition(self._telemetry, settings.compat)
        self._collector = Collector(source, restarted=self._telemetry.restarted)
        path = settings.agent_socket()
        mode = int(settings.socket_mode, 8) if settings.socket_mode else _default_mode(path.parent.as_posix())
        self._intake = Intake(bind_agent_socket(path, mode), rejected=self._telemetry.rejected)
        self.token = leave_token(path.parent)
        self._flusher = Flusher(
            self._intake,
            self._read_driver,
            done=self._telemetry.flushed,
            cooldown_seconds=settings.flush_cooldown,
        )

    async def tick(self) -> None:
        interval = self._settings.interval
        reading = await self._collector.read(wait=0.8 * interval)
        with self._telemetry.tick_duration.time():
            previous = self.frame.snapshot if self.frame else None
            reports = self._intake.reports()
            snapshot = observe(
                previous, self._collector.state, reading, reports, time.time(), time.monotonic() - self._began
            )
            tick = advance(self._memory, self.rules, snapshot)
            self._memory, self.frame = tick.memory, tick.frame
        for fault in snapshot.faults:
            self._telemetry.fault(fault)
        for alert in tick.raised:
            log.warning("alert %s fires: %s", alert.rule, dict(alert.annotations).get("summary", alert.labels))
        for alert in tick.resolved:
            log.info("alert %s resolved: %s", alert.rule, dict(alert.labels))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self._began = time.monotonic()
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD)
        self._collector.start()
        self._intake.serve()
        ticking = asyncio.create_task(self._tick_forever())
        try:
            yield
        finally:
            ticking.cancel()
            self._intake.close()
            self._settings.agent_socket().unlink(missing_ok=True)
            await self._collector.stop()

    def receipts(self) -> Sequence[Receipt]:
        return tuple(self._flusher.receipts)

    def metrics(self, accept: str, compat: Compat | None = None) -> Page:
        return self._exposition.page(self.frame, accept, compat)

    async def flush(self, request: FlushRequest, requested_by: str) -> FlushAnswer:
        log.info("flush of %s, steps %s, by %s", request.target, ",".join(request.steps), requested_by)
        answer = await self._flusher.flush(request, requested_by)
        self._wake.set()  # the next frame shows what the flush did
        return answer

    async def release(self, seconds: float, requested_by: str) -> tuple[float, bool]:
        """Until when the driver is let go of, and whether it is really free."""
        log.info("driver released for %g s by %s", seconds, requested_by)
        until = time.time() + seconds
        return until, await self._collector.release(seconds)

    def release_for_maintenance(self) -> None:
        """SIGUSR1, for driver upgrade hooks that cannot speak HTTP."""
        self._releasing = asyncio.ensure_future(self.release(RELEASE_SECONDS, "SIGUSR1"))

    async def _read_driver(self) -> Reading | None:
        return await self._collector.read(wait=FLUSH_READ_SECONDS)

    async def _tick_forever(self) -> None:
        """Ticks on a monotonic schedule; one that comes too late is skipped and counted, never queued."""
        interval, due = self._settings.interval, time.monotonic()
        while True:
            try:
                await self.tick()
            except Exception:
                log.exception("a tick failed; the frame before it stays")
            due += interval
            late = time.monotonic() - due
            if late > 0:
                skipped = int(late // interval) + 1
                self._telemetry.ticks_skipped.inc(skipped)
                due += skipped * interval
            self._wake.clear()
            try:
                await asyncio.wait_for(self._wake.wait(), max(0.0, due - time.monotonic()))
                due = time.monotonic()
            except asyncio.TimeoutError:
                pass


async def serve(settings: Settings, source: str) -> None:
    """Runs until SIGINT or SIGTERM. Raises ConfigError if port or socket cannot be had."""
    listener = _listen(settings)
    daemon = Daemon(settings, source)
    app = create_app(daemon, Tokens(daemon.token), daemon.running)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
        timeout_keep_alive=75,  # longer than a scrape interval, so that Prometheus keeps its connection
    )
    log.info("serving http://%s, agents at %s, source %s", settings.listen, settings.agent_socket(), source)
    server = _Server(config)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, server.leave)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, daemon.release_for_maintenance)
    await server.serve(sockets=[listener])


class _Server(uvicorn.Server):
    """uvicorn raises a signal once more after it has served, which would turn an orderly end into a failure."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def leave(self) -> None:
        self.should_exit = True


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio asks for it before TCP_NODELAY
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        taken = error.errno == errno.EADDRINUSE
        mend = "another program has the port; stop it or choose another with --listen" if taken else "see --listen"
        raise ConfigError(f"cannot listen on {settings.listen}: {error.strerror}: {mend}") from None
    return listener


def _default_mode(directory: str) -> int:
    """A machine-wide socket is for every user's programs; one in a user's own directory is for that user."""
    return 0o666 if directory.startswith("/run/gpumond") else 0o600
