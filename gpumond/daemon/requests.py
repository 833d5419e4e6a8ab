"""Requests of users, programs, rules and signals that change something. Each is audited and logged."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import replace
from hashlib import sha256
from operator import attrgetter
from typing import Any

from gpumond.config.settings import RELOADED, Settings
from gpumond.daemon.kernel import Parts
from gpumond.facts.errors import ConfigError, FlushError, NoSuchReceiver, StoreUnavailable
from gpumond.facts.flush import FlushOutcome, FlushRequest
from gpumond.facts.messages import AgentResponse, Asked
from gpumond.facts.pools import Receipt
from gpumond.facts.snapshot import AgentReport, Fault
from gpumond.facts.units import human
from gpumond.features.alerts.receiver_check import ReceiverTest, send_test
from gpumond.features.quotas.quotas import DueLimit
from gpumond.programs.commands import AgentCommands, SnapshotFile
from gpumond.store.rows import to_text
from gpumond.store.store import Bounds

log = logging.getLogger(__name__)

RELEASE_SECONDS = 120.0
"""The duration of a release that a signal requests."""
AUDITED_PIDS = 100
"""The most pids that the audit entry of a flush names."""

Load = Callable[[], Settings]


class Requests:
    """``load`` reads the configuration again, for ``reload``; without it a reload raises ConfigError."""

    def __init__(self, parts: Parts, load: Load | None) -> None:
        self._parts, self._load = parts, load
        self._commands = AgentCommands(parts.edges.agents, parts.store.audit, self._note)
        self._of_signals: set[asyncio.Future[None]] = set()

    async def flush(self, request: FlushRequest, requested_by: str) -> FlushOutcome:
        """Flush, with an audit entry before and after. Raises FlushError, StoreUnavailable."""
        parts = self._parts
        kind = "plan" if request.dry_run else "forced flush" if request.force else "flush"
        description = f"{kind} of {request.target}, steps {','.join(request.steps)}, by {requested_by}"
        if not request.dry_run:
            detail = {"target": str(request.target), "steps": request.steps}
            forced = {"force": True} if request.force else {}
            await parts.store.audit(requested_by, "flush.request", detail | forced)
        try:
            outcome = await parts.flusher.flush(request, requested_by)
        except FlushError as error:
            log.info("%s: refused: %s", description, error)
            if not request.dry_run:
                await self._note(requested_by, "flush.refused", str(error))
            raise
        except asyncio.CancelledError:
            log.info("%s: interrupted: the daemon stops", description)
            if not request.dry_run:
                reason = f"the daemon stopped before the flush of {request.target} ended"
                await self._note(requested_by, "flush.interrupted", reason)
            raise
        counts = Counter(map(_outcome, outcome.receipts))
        results = ", ".join(f"{count} {name}" for name, count in counts.items())
        returned = "" if request.dry_run else f"; {human(outcome.released_bytes)} released"
        log.info("%s: %s%s", description, results, returned)
        if not request.dry_run:
            await self._note(requested_by, "flush.receipts", _proof(outcome), outcome.receipts)
        parts.edges.wake.set()  # the next frame shows the effect of the flush
        return outcome

    async def ask(
        self,
        pid: int,
        kind: Asked,
        limit_bytes: int | None,
        device: str | None,
        requested_by: str,
        record_seconds: float | None = None,
    ) -> AgentResponse | None:
        """Ask the agent of one program; None if it does not answer in time. Raises NoSuchTarget, StoreUnavailable."""
        return await self._commands.ask(pid, kind, limit_bytes, device, requested_by, record_seconds)

    async def fetch(
        self, pid: int, snapshot_id: int, requested_by: str
    ) -> tuple[int, AsyncGenerator[bytes, None]] | AgentResponse | None:
        """Open the file of a snapshot, as `AgentCommands.fetch` does: its size and bytes, a refusal, or None."""
        found = await self._commands.fetch(pid, snapshot_id, requested_by)
        return (found.size_bytes, found.parts) if isinstance(found, SnapshotFile) else found

    async def test_receiver(self, name: str, requested_by: str) -> ReceiverTest:
        """Send a test message to a receiver, without its queue. Raises NoSuchReceiver, StoreUnavailable."""
        parts = self._parts
        receivers = {receiver.name: receiver for receiver in parts.edges.receivers(parts.settings)}
        if name not in receivers:
            raise NoSuchReceiver(f"no receiver has the name {name}; the receivers are {', '.join(receivers) or 'none'}")
        await parts.store.audit(requested_by, "receiver.test", {"receiver": name})
        return await send_test(receivers[name], requested_by)

    async def set_limit(self, due: DueLimit) -> AgentResponse | None:
        """Set the limit of a quota in one program; None if it did not answer. Raises StoreUnavailable."""
        return await self._commands.set_limit(due)

    async def request_end(self, report: AgentReport, requested_by: str) -> str:
        """Ask a program to end. Return the reason if it was not asked. Raises StoreUnavailable."""
        if not self._parts.settings.allow_end_requests:
            return "the configuration does not allow it (allow_end_requests)"
        return await self._commands.request_end(report, requested_by)

    async def release(self, seconds: float, requested_by: str) -> tuple[float, bool]:
        """Release the driver. Return until when (unix seconds), and whether no process holds it any more."""
        await self._parts.store.audit(requested_by, "release", {"for_seconds": seconds})
        return await self._release(seconds, requested_by)

    def release_on_signal(self) -> None:
        """SIGUSR1, for driver upgrade hooks that cannot use HTTP. Works without the store."""
        self._start(self._release_quietly())

    async def reload(self, requested_by: str) -> str:
        """Return a sentence about the effect. Raises ConfigError; the previous configuration then remains."""
        parts = self._parts
        try:
            if self._load is None:
                raise ConfigError("this daemon was started without a configuration that could be read again")
            settings = await asyncio.to_thread(self._load)
        except ConfigError as error:
            log.error("the configuration is invalid, the previous one remains in effect: %s", error)
            parts.edges.faults["configuration"] = Fault("configuration", "not_loaded", None, error.place)
            parts.telemetry.configuration_failed()
            raise
        later = parts.settings.differs(settings)
        parts.settings = replace(parts.settings, **{name: getattr(settings, name) for name in RELOADED})
        parts.rulebook.configure(
            settings.built_in_rules(), settings.rules, settings.receiver_names(), settings.rule_overrides
        )
        parts.quotas.configure(settings.quotas)
        parts.current.exposition.also = settings.compat
        parts.edges.engines.configure(settings.engines)
        parts.flusher.cooldown_seconds = settings.flush_cooldown
        parts.store.bounds = Bounds(settings.retention)
        await parts.outbox.configure(parts.edges.receivers(settings))
        effect = f"reloaded; {len(parts.rulebook.rules)} rules" + (
            f"; requires a restart: {', '.join(later)}" if later else ""
        )
        parts.edges.faults.pop("configuration", None)
        parts.telemetry.configuration_loaded()
        log.info("configuration %s, by %s", effect, requested_by)
        try:
            await parts.store.audit(requested_by, "reload", {"rules": len(settings.rules), "needs_restart": later})
        except StoreUnavailable as error:
            log.error("a reload could not be recorded in the audit: %s", error)
        return effect

    def reload_on_signal(self) -> None:
        """SIGHUP."""
        self._start(self._reload_quietly())

    async def close(self) -> None:
        """Cancel the requests of signals, and wait for their end."""
        for task in self._of_signals:
            task.cancel()
        await asyncio.gather(*self._of_signals, return_exceptions=True)

    async def _reload_quietly(self) -> None:
        try:
            await self.reload("SIGHUP")
        except ConfigError:
            pass  # reload has logged it

    async def _release_quietly(self) -> None:
        await self._release(RELEASE_SECONDS, "SIGUSR1")

    async def _release(self, seconds: float, requested_by: str) -> tuple[float, bool]:
        log.info("driver released for %g s by %s", seconds, requested_by)
        until = self._parts.edges.clock.wall() + seconds
        return until, await self._parts.edges.collector.release(seconds)

    async def _note(self, actor: str, action: str, detail: Any, receipts: Sequence[Receipt] = ()) -> None:
        """Audit a completed change. A store that cannot be written logs its error and does not fail the request."""
        try:
            await self._parts.store.audit(actor, action, detail)
            await self._parts.store.add_receipts(receipts)
        except StoreUnavailable:
            pass

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._of_signals.add(task)
        task.add_done_callback(self._of_signals.discard)


_outcome = attrgetter("outcome")


def _proof(outcome: FlushOutcome) -> dict[str, Any]:
    """Return the audit's detail of a flush: totals, and the SHA-256 of the receipts as the store keeps them, one a
    line."""
    text = "".join(f"{to_text(receipt)}\n" for receipt in outcome.receipts)
    return {
        "id": outcome.id,
        "released_bytes": outcome.released_bytes,
        "receipts": len(outcome.receipts),
        "outcomes": dict(Counter(receipt.outcome for receipt in outcome.receipts)),
        "pids": sorted({receipt.pid for receipt in outcome.receipts})[:AUDITED_PIDS],
        "sha256": sha256(text.encode()).hexdigest(),
    }
