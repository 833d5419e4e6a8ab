"""The core: what features build on, and the parts that they add to the daemon.

Data flows one way. At each tick the daemon reads devices and programs, and every part may add facts (``observe``), then
conclusions without I/O (``conclude``). The frame is swapped, and every part may act on it (``act``).
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from gpumond.config.settings import Settings, hash_of_rules, hash_of_settings
from gpumond.devices.child.supervisor import Supervisor
from gpumond.diagnosis.diagnosis import Diagnosis
from gpumond.events import EventLog
from gpumond.facts.alerts import AlertStates, Rule
from gpumond.facts.engines import EngineReading
from gpumond.facts.errors import FlushError, StoreUnavailable
from gpumond.facts.flush import FlushRequest, FlushResponse
from gpumond.facts.frame import Alert, Frame
from gpumond.facts.pools import Receipt
from gpumond.facts.program import ProcessKey
from gpumond.facts.quota import Admission, GrantedRequest
from gpumond.facts.snapshot import AgentReport, DeviceReading, Fault, Reading, Snapshot
from gpumond.facts.suspension import SuspensionReceipt
from gpumond.host.runtime_directory import nonstandard_directory
from gpumond.host.tasks import Broadcast
from gpumond.metrics.dcgm import Compat
from gpumond.metrics.exposition import ALL_GROUPS, Exposition, Group, Scrape, ScrapeFormat
from gpumond.metrics.telemetry import Telemetry
from gpumond.programs.agent_server import AgentServer
from gpumond.programs.audited_requests import AuditedRequests
from gpumond.quantities.window import RuleWindow
from gpumond.store.store import Store
from gpumond.tick.history import History

T = TypeVar("T")

FLUSH_READ_SECONDS = 2.0
"""Maximum time that a flush waits for a reading."""
FLUSHES_AT_ONCE = 16
"""Number of requests that ``flush_each`` carries out at the same time."""
FIRST_FRAME_SECONDS = 2.0
"""Maximum time that a scrape waits for the first frame: a page without devices would be a gap in each series."""


@dataclass(frozen=True, slots=True)
class Clock:
    """``wall``: Unix seconds; ``monotonic``: seconds since any fixed moment; ``uptime``: since the machine started."""

    wall: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    uptime: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """All that does I/O or reads a clock. Devices and programs report to ``telemetry`` and ``tick_due``."""

    devices: Supervisor
    agents: AgentServer
    store: Store
    telemetry: Telemetry
    tick_due: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the next tick is due at once."""
    clock: Clock = Clock()
    private_pid_namespace: bool | None = None
    faults: dict[str, Fault] = field(default_factory=dict)
    """Faults of the sockets and of the configuration, by name."""
    services: Mapping[type, object] = field(default_factory=dict)
    """Services that features use instead of their own, by kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """The frame of one tick, and what its conclusions rest on.

    ``raised`` and ``resolved``: alerts that began and ceased to fire. ``alert_states``: states of all alerts, by rule.
    ``exited_reports``: the last reports of agents that have disconnected; they are in no frame, and some ended out of
    memory.
    """

    frame: Frame
    window: RuleWindow
    raised: tuple[Alert, ...] = ()
    resolved: tuple[Alert, ...] = ()
    alert_states: Mapping[str, AlertStates] = field(default_factory=dict)
    exited_reports: tuple[AgentReport, ...] = ()


class Part:
    """What a feature does in the daemon. Every method may be left out."""

    table = ""
    """The table of the store that ``load`` reads, for the log and a fault."""

    loaded = True
    """False while rows of the store have not been read: ``load`` is then called again before a later tick."""

    async def load(self) -> Sequence[str]:
        """Read what the store keeps. Return a sentence for each row that is skipped. Raises StoreUnavailable."""
        return ()

    def start(self) -> None:
        """Begin background work. Devices and programs can be read from now on."""

    def observe(self, snapshot: Snapshot) -> Snapshot:
        """Add facts to a snapshot."""
        return snapshot

    def conclude(self, tick: Tick) -> Tick:
        """Draw conclusions, without I/O. They take effect in ``act``."""
        return tick

    def act(self, tick: Tick) -> None:
        """Carry out what the current frame shows; wait for nothing. No other task has run since ``conclude``."""

    def add_receipt(self, receipt: Receipt) -> None:
        """Note a receipt."""

    async def configure(self, settings: Settings) -> None:
        """Adopt the settings of a reload."""

    async def close(self) -> None:
        """End background work."""


class DaemonControl(Protocol):
    """Changes of the daemon itself."""

    async def reload(self, requested_by: str) -> str:
        """Return a sentence about the effect. Raises ConfigError; the previous configuration then remains."""

    async def detach(self, seconds: float, requested_by: str) -> tuple[float, bool]:
        """Release the driver. Return until when (Unix seconds), and whether no process holds it anymore."""


class FlushService(Protocol):
    """The one path by which anything is flushed."""

    async def flush(self, request: FlushRequest, requested_by: str) -> FlushResponse:
        """Flush, with an audit entry before and after. Raises FlushError, StoreUnavailable."""


async def flush_each(
    flush: Callable[[FlushRequest, str], Awaitable[FlushResponse]],
    requests: Iterable[tuple[FlushRequest, Receipt]],
    requested_by: str,
) -> list[Sequence[Receipt]]:
    """Carry out requests, each with the receipt of its refusal, a few at a time. An error of one refuses it alone."""
    slots = asyncio.Semaphore(FLUSHES_AT_ONCE)

    async def carry_out(request: FlushRequest, refusal: Receipt) -> Sequence[Receipt]:
        async with slots:
            try:
                return (await flush(request, requested_by)).receipts
            except (FlushError, StoreUnavailable) as error:
                return (replace(refusal, reason=str(error)),)

    return await asyncio.gather(*(carry_out(*each) for each in requests))


class EngineStep(Protocol):
    """The step of a flush that asks declared serving engines to release memory."""

    def readings(self) -> Sequence[EngineReading]:
        """Return the newest state of each engine."""

    def use_receipts(
        self, receipts: Callable[[], Iterable[Receipt]], record_receipt: Callable[[Receipt], Awaitable[None]]
    ) -> None:
        """Use these past receipts, and ``record_receipt`` for that of an engine that was returned to service."""

    async def flush(self, name: str, request: FlushRequest, requested_by: str) -> list[Receipt]:
        """Release the memory of one engine, or undo the last release, and return a receipt for each device."""

    def resume_restorations(self) -> None:
        """Continue to return engines to service, as the previous daemon did."""

    async def close(self) -> None: ...


class AdmissionService(Protocol):
    """Requests for device memory; `features.quotas.admissions.Admissions` documents each method."""

    def request(
        self,
        snapshot: Snapshot,
        device: DeviceReading,
        need_bytes: int,
        caller: str,
        *,
        uid: int | None = None,
        pid: int | None = None,
        workload: str = "",
        wait: bool = False,
        counts_in_full: bool = False,
    ) -> Admission: ...

    def granted(self, snapshot: Snapshot) -> tuple[GrantedRequest, ...]: ...

    def renew(self, snapshot: Snapshot | None, request_id: str, caller: str) -> Admission: ...

    def extend(self, request_id: str, caller: str) -> None: ...

    def cancel(self, request_id: str, caller: str) -> None: ...

    async def save(self) -> bool: ...


class SuspendService(Protocol):
    """Suspension of programs that allow it."""

    async def suspend_idle(
        self, process: ProcessKey, requested_by: str, dry_run: bool = False, requested_for: str = ""
    ) -> SuspensionReceipt:
        """Suspend a program for a rule or for a request for memory, if nothing forbids it."""


class RuleService(Protocol):
    """The rules in effect."""

    @property
    def rules(self) -> tuple[Rule, ...]: ...


class SilenceService(Protocol):
    """The silences in effect."""

    def silences_of(self, alert: Alert) -> Sequence[str]:
        """Return the ids of the active silences that match an alert."""


class ConfigHashes(NamedTuple):
    """Hashes of the settings and of the rules in effect."""

    settings: str
    rules: str


class Core:
    """Clock, devices, programs, store and telemetry of one daemon, its current frame, and the services of features.

    ``settings`` are replaced by a reload. ``speedup``: the factor by which diagnosis time is accelerated.
    """

    def __init__(self, settings: Settings, dependencies: Dependencies, speedup: float = 1.0) -> None:
        self.settings, self.dependencies = settings, dependencies
        self.clock, self.devices, self.programs = dependencies.clock, dependencies.devices, dependencies.agents
        self.store, self.telemetry, self.faults = dependencies.store, dependencies.telemetry, dependencies.faults
        self.started_at, self.started_monotonic = dependencies.clock.wall(), dependencies.clock.monotonic()
        self.store_file = dependencies.store.path.absolute()
        self.nonstandard_runtime_dir = nonstandard_directory(settings.runtime_directory())
        self.agent_socket = settings.agent_socket().absolute()
        self.url: str | None = None
        """None while no port accepts requests."""
        self.diagnosis = Diagnosis(speedup)
        self.events = EventLog(self.started_at)
        self.program_requests = AuditedRequests(self.programs, self.store.audit, self.audit_change)
        self.exposition = Exposition(dependencies.telemetry, settings.compat)
        self.frame: Frame | None = None
        self.responses: dict[str, bytes] = {}
        """Encoded responses of the API about this frame, by route."""
        self.parts: tuple[Part, ...] = ()
        self.first_frame_seconds = FIRST_FRAME_SECONDS
        self._frame_changed = Broadcast()
        self._services: dict[type, object] = dict(dependencies.services)

    def provide(self, kind: type[Any], service: object) -> None:
        """Offer a service of a feature to routes and to other features."""
        self._services[kind] = service

    def get(self, kind: type[T]) -> T:
        """Return the service of this kind. Raises LookupError if no feature provides it."""
        return cast("T", self._services[kind])

    def find(self, kind: type[T]) -> T | None:
        """Return the service of this kind, None if there is none."""
        return cast("T | None", self._services.get(kind))

    @property
    def history(self) -> History:
        return self.diagnosis.history

    async def read_driver(self) -> Reading | None:
        """Return a new reading for a flush, None if the driver does not answer in time."""
        return await self.devices.read(wait=FLUSH_READ_SECONDS)

    def set_frame(self, frame: Frame) -> None:
        """Make ``frame`` the current one."""
        self.frame, self.responses = frame, {}
        self._frame_changed.send()

    async def await_frame(self, seconds: float) -> bool:
        """Wait for the next frame. Returns False if none is taken in time."""
        return await self._frame_changed.wait(seconds)

    async def metrics(self, accept: str, compat: Compat | None = None, groups: frozenset[Group] = ALL_GROUPS) -> Scrape:
        """Return the metrics of the current frame. The first scrapes after the start wait for the first frame."""
        if self.frame is None:
            await self.await_frame(self.first_frame_seconds)
        return self.exposition.scrape(self.frame, ScrapeFormat.of(accept, compat, groups))

    def config_hashes(self) -> ConfigHashes:
        """Return the hashes by which this daemon is compared with those of other machines."""
        rule_service = self.find(RuleService)
        rules = rule_service.rules if rule_service else ()
        return ConfigHashes(hash_of_settings(self.settings), hash_of_rules(rules))

    def machine_names(self) -> frozenset[str]:
        """Return the names of this machine that alerts may have as `instance`, in lower case."""
        hostname, settings = socket.gethostname(), self.settings
        address = () if settings.is_loopback or settings.host in ("0.0.0.0", "::") else (settings.host,)
        return frozenset(name.lower() for name in (hostname, hostname.partition(".")[0], *settings.hosts, *address))

    def gpu_processes(self) -> Mapping[ProcessKey, float | None] | None:
        """Return the processes that the driver lists in the current frame; None before the first one.

        Each with its idle time in seconds, None if the driver does not report its use of one of its devices.
        """
        if self.frame is None:
            return None
        idle_seconds: dict[ProcessKey, float | None] = {}
        for device in self.frame.snapshot.devices:
            for key, process in device.processes_by_key.items():
                idle, other = process.idle_seconds, idle_seconds.get(key, inf)
                idle_seconds[key] = None if idle is None or other is None else min(idle, other)
        return idle_seconds

    def add_receipt(self, receipt: Receipt) -> None:
        """Note a receipt in counters, events and all parts."""
        owners = None if self.frame is None else self.frame.owners
        has_series = owners is None or receipt.workload in {owner.workload for owner in owners}
        self.telemetry.add_receipt(receipt if has_series else replace(receipt, workload=""))
        self.events.add_receipt(receipt)
        for part in self.parts:
            part.add_receipt(receipt)

    async def audit_change(self, actor: str, action: str, detail: Any, receipts: Sequence[Receipt] = ()) -> None:
        """Audit a completed change. A store that cannot be written logs its error and does not fail the request."""
        try:
            await self.store.audit(actor, action, detail)
            await self.store.add_receipts(receipts)
        except StoreUnavailable:
            pass
