"""The daemon: its dependencies, its lifetime, its tick, and the operations on it."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import replace

from gpumond.config.loading import LastValidFile
from gpumond.config.settings import RELOADABLE, Settings
from gpumond.core import Core, DaemonControl, Dependencies, Part, Tick
from gpumond.devices.child.supervisor import Supervisor
from gpumond.diagnosis.diagnosis import diagnose
from gpumond.diagnosis.sentences import with_retainers
from gpumond.facts.errors import ConfigError, StoreUnavailable
from gpumond.facts.frame import Frame
from gpumond.facts.snapshot import Fault, Reading, Snapshot
from gpumond.facts.units import list_text, plural
from gpumond.features import features
from gpumond.host.machine import in_private_pid_namespace, reserved_descriptors
from gpumond.host.peer import person_uid
from gpumond.host.runtime_directory import AgentSocket
from gpumond.host.tasks import Tasks, background_task, cancel_all, serve_pending_requests
from gpumond.metrics.owners import owners_with_series
from gpumond.metrics.telemetry import Telemetry
from gpumond.programs.agent_connection import SocketLimits
from gpumond.programs.agent_server import AgentServer
from gpumond.quantities.window import RuleWindow, next_window
from gpumond.store.store import HistoryPersistence, Store, StoreLimits
from gpumond.tick.ledger import make_ledger
from gpumond.tick.observe import observe

log = logging.getLogger(__name__)

READ_WAIT_RATIO = 0.8
"""Part of an interval that a tick waits for a reading."""
STORE_CLOSE_SECONDS = 2.0
"""Maximum time that the end of a daemon waits for a disk that hangs."""
DETACH_SECONDS = 120.0
"""The time for which a signal detaches the daemon from the driver."""

LoadSettings = Callable[[], Settings]


@contextmanager
def system_dependencies(settings: Settings, source: str) -> Iterator[Dependencies]:
    """Bind the agents' socket, and remove it at the end. ``source`` names an entry of ``devices.SOURCES``.

    Raises ConfigError if the socket cannot be bound.
    """
    telemetry, tick_due = Telemetry(), asyncio.Event()
    path = settings.agent_socket()
    agent_socket = AgentSocket(path, settings.agent_socket_mode(), settings.runtime_directory())
    faults: dict[str, Fault] = {}

    def restore_agent_socket() -> socket.socket | None:
        is_restored, problem = agent_socket.restore_if_removed(), agent_socket.problem
        if problem:
            faults["agents"] = Fault("agents", "socket_lost", None, problem)
        elif faults.pop("agents", None) or is_restored:
            log.warning("%s was removed and created again; agents reconnect to it", path)
        return agent_socket.listener if is_restored else None

    devices = Supervisor(source, restarted=telemetry.count_driver_restart, opened=tick_due.set)
    telemetry.add_processes(lambda: devices.pid)
    try:
        yield Dependencies(
            devices=devices,
            agents=AgentServer(
                agent_socket.listener,
                limits=SocketLimits(reserved_descriptors=reserved_descriptors()),
                on_reports=telemetry.count_report,
                on_rejection=telemetry.count_rejection,
                find_new_listener=restore_agent_socket,
            ),
            store=Store(settings.store_file(), StoreLimits(settings.retention)),
            telemetry=telemetry,
            tick_due=tick_due,
            private_pid_namespace=in_private_pid_namespace(),
            faults=faults,
        )
    finally:
        agent_socket.close()


class Daemon(DaemonControl):
    """The devices and programs of one machine.

    ``load`` reads the configuration again, for a reload; without it a reload raises ConfigError. ``speedup`` is the
    factor by which diagnosis time is accelerated. Construct it on the event loop's thread.
    """

    def __init__(
        self,
        settings: Settings,
        dependencies: Dependencies,
        load: LoadSettings | None = None,
        speedup: float = 1.0,
        last_valid: LastValidFile | None = None,
    ) -> None:
        core = self.core = Core(settings, dependencies, speedup)
        self._load = load
        if last_valid is None:
            core.telemetry.set_configuration_loaded()
        else:
            log.error("the configuration is invalid, so its last valid content stays in effect: %s", last_valid.error)
            core.faults["configuration"] = Fault("configuration", "not_loaded", None, last_valid.place)
            core.telemetry.set_configuration_failed(last_valid.loaded_at)
        core.provide(DaemonControl, self)
        core.parts = tuple(feature.resolve(name)(core) for feature in features() for name in feature.parts)
        self._history = HistoryPersistence(core.store)
        self._window = RuleWindow()
        self._store_wait_seconds = STORE_CLOSE_SECONDS
        self._signal_tasks = Tasks()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run all parts, and tick once per interval."""
        async with self.started(), background_task(self._run_forever()):
            yield

    @asynccontextmanager
    async def started(self) -> AsyncIterator[None]:
        """Run all parts except the schedule: ``tick`` is left to the caller. At the end each part is closed, also
        if another one fails."""
        core = self.core
        async with AsyncExitStack() as stack:
            stack.push_async_callback(lambda: core.store.close(self._store_wait_seconds))
            await core.store.open()
            await self._history.restore(core.history, core.diagnosis.earlier_uses)
            stack.push_async_callback(
                self._finish, lambda: self._history.close(core.history, core.diagnosis.earlier_uses)
            )
            stack.push_async_callback(core.devices.stop)
            core.devices.start()
            stack.callback(core.programs.close)
            core.programs.serve()
            for part in core.parts:
                stack.push_async_callback(self._finish, part.close)
                await self._load_part(part)
            for part in core.parts:
                part.start()
            stack.push_async_callback(self._finish, lambda: cancel_all(self._signal_tasks))
            yield

    async def tick(self) -> Tick:
        """Read, conclude, publish, then act. The frame is swapped before receivers are notified and programs are
        flushed. Requests that arrive meanwhile are answered between two stages, from the previous frame."""
        core, interval = self.core, self.core.settings.interval
        core.programs.receive()  # so that a report that has arrived is older than the reading
        reading = await core.devices.read(wait=READ_WAIT_RATIO * interval)
        with core.telemetry.tick_duration.time():
            snapshot = self._observe(reading)
            exited_reports = core.programs.take_exited_reports()
            core.programs.set_suspended(snapshot.unresponsive)
            await serve_pending_requests()
            diagnose(core.diagnosis, snapshot)
            await serve_pending_requests()
            verdicts = with_retainers(core.diagnosis.verdicts, snapshot)
            self._window = next_window(self._window, snapshot)
            owners = owners_with_series((core.frame and core.frame.owners) or {}, snapshot)
            frame = Frame(snapshot, make_ledger(snapshot, core.frame), tuple(verdicts), owners=owners)
            tick = Tick(frame=frame, window=self._window, exited_reports=exited_reports)
            await serve_pending_requests()
            for part in core.parts:
                tick = part.conclude(tick)
            core.set_frame(tick.frame)
            for part in core.parts:
                part.act(tick)
            self._publish(tick)
        self._history.advance(core.history, core.diagnosis.earlier_uses, snapshot.elapsed_seconds)
        core.telemetry.count_faults(snapshot.faults, is_complete=reading is not None)
        return tick

    def _observe(self, reading: Reading | None) -> Snapshot:
        """Return the facts of this tick."""
        core, dependencies, previous = self.core, self.core.dependencies, self.core.frame
        snapshot = observe(
            previous.snapshot if previous else None,
            core.devices.state,
            reading,
            core.programs.reports(),
            taken_at=core.clock.wall(),
            elapsed_seconds=core.clock.monotonic() - core.started_monotonic,
            store_writable=core.store.writable,
            faults=(*core.store.faults(), *core.faults.values()),
            private_pid_namespace=dependencies.private_pid_namespace,
            ends=core.programs.take_ends(),
            silent=core.programs.silent_reports(),
            uptime_seconds=core.clock.uptime(),
            person_uid=person_uid,
        )
        for part in core.parts:
            snapshot = part.observe(snapshot)
        return snapshot

    def _publish(self, tick: Tick) -> None:
        """Pass the frame to telemetry and events."""
        core = self.core
        now, owners = tick.frame.snapshot.elapsed_seconds, tick.frame.owners or {}
        core.telemetry.workloads.set_connected(
            owner.workload for owner, last_seen in owners.items() if last_seen == now and owner.workload
        )
        events = core.events.publish(tick.frame, tick.raised, tick.resolved, tick.exited_reports)
        core.telemetry.count_events(events)
        core.telemetry.store_writable.set(core.store.writable)
        core.telemetry.set_config_hashes(*core.config_hashes())

    async def _run_forever(self) -> None:
        """Tick on a monotonic schedule. A tick that comes too late is skipped and counted, never queued."""
        core = self.core
        due = time.monotonic()
        while True:
            core.dependencies.tick_due.clear()
            try:
                for part in core.parts:
                    if core.store.writable and not part.loaded:
                        await self._load_part(part)
                await self.tick()
            except Exception:
                log.exception("a tick failed; the previous frame stays in effect")
            await asyncio.sleep(0)
            interval = core.settings.interval
            due += interval
            late_seconds = time.monotonic() - due
            if late_seconds > 0:
                skipped = int(late_seconds // interval) + 1
                core.telemetry.ticks_skipped.inc(skipped)
                due += skipped * interval
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(core.dependencies.tick_due.wait(), max(0.0, due - time.monotonic()))
                due = time.monotonic()

    async def _load_part(self, part: Part) -> None:
        """Load what the store keeps, or leave it to a later tick. Logs each row that is skipped."""
        try:
            problems = await part.load()
        except StoreUnavailable:
            return  # the store has logged it
        if part.table:
            self.core.store.add_skipped_rows(part.table, len(problems))
        for problem in problems:
            log.error("a row of the table %s is skipped: %s", part.table, problem)

    async def reload(self, requested_by: str) -> str:
        """Return a sentence about the effect. Raises ConfigError; the previous configuration then remains."""
        core = self.core
        try:
            if self._load is None:
                raise ConfigError("this daemon was started without a configuration that can be reloaded")
            settings = await asyncio.to_thread(self._load)
        except ConfigError as error:
            log.error("the configuration is invalid, so the previous one stays in effect: %s", error)
            core.faults["configuration"] = Fault("configuration", "not_loaded", None, error.place)
            core.telemetry.set_configuration_failed()
            raise
        needs_restart = core.settings.changes_requiring_restart(settings)
        core.settings = replace(core.settings, **{name: getattr(settings, name) for name in RELOADABLE})
        core.exposition.additional = settings.compat
        core.store.limits = StoreLimits(settings.retention)
        for part in core.parts:
            await part.configure(settings)
        effect = f"reloaded; {plural(len(core.settings.active_rules()), 'rule')}"
        if needs_restart:
            effect += f"; restart the daemon to apply {list_text(needs_restart)}"
        core.faults.pop("configuration", None)
        core.telemetry.set_configuration_loaded()
        log.info("configuration %s (requested by %s)", effect, requested_by)
        try:
            await core.store.audit(
                requested_by, "reload", {"rules": len(settings.rules), "needs_restart": needs_restart}
            )
        except StoreUnavailable as error:
            log.error("a reload couldn't be recorded in the audit log: %s", error)
        return effect

    async def detach(self, seconds: float, requested_by: str) -> tuple[float, bool]:
        """Release the driver. Return until when (Unix seconds), and whether no process holds it anymore."""
        await self.core.store.audit(requested_by, "release", {"for_seconds": seconds})
        return await self._detach(seconds, requested_by)

    def reload_on_signal(self) -> None:
        """Reload, as SIGHUP requests."""
        self._signal_tasks.start(self._reload_quietly())

    def detach_on_signal(self) -> None:
        """Detach, as SIGUSR1 requests: for driver upgrade hooks that cannot use HTTP. Works without the store."""
        self._signal_tasks.start(self._detach(DETACH_SECONDS, "SIGUSR1"))

    async def _reload_quietly(self) -> None:
        with suppress(ConfigError):  # reload has logged it
            await self.reload("SIGHUP")

    async def _detach(self, seconds: float, requested_by: str) -> tuple[float, bool]:
        log.info("detaching from the driver for %g s (requested by %s)", seconds, requested_by)
        until = self.core.clock.wall() + seconds
        return until, await self.core.devices.detach_for(seconds)

    async def _finish(self, work: Callable[[], Awaitable[None]]) -> None:
        """Wait for work that writes to the store. The first that takes too long ends the wait for all the others."""
        task = asyncio.ensure_future(work())
        done, _ = await asyncio.wait({task}, timeout=self._store_wait_seconds)
        if not done:
            self._store_wait_seconds = 0.0
            task.cancel()
        await asyncio.gather(task, return_exceptions=not done)
