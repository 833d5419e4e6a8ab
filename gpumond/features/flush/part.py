"""Flushes in the daemon: audited, with receipts in the store."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import sha256
from operator import attrgetter
from typing import Any

from gpumond.config.settings import Settings
from gpumond.facts.errors import FlushError, StoreUnavailable
from gpumond.facts.flush import FlushOutcome, FlushRequest
from gpumond.facts.pools import Receipt
from gpumond.facts.units import human
from gpumond.features.flush.flusher import Flusher
from gpumond.features.flush.hook import AlertmanagerHook
from gpumond.kernel import EngineStep, Flushes, Kernel, Part
from gpumond.store.rows import to_text

log = logging.getLogger(__name__)

AUDITED_PIDS = 100
"""The most pids that the audit entry of a flush names."""


class FlushPart(Part, Flushes):
    table = "receipts"

    def __init__(self, kernel: Kernel) -> None:
        self._kernel, self._store = kernel, kernel.store
        self.flusher = Flusher(
            kernel.programs,
            kernel.read_driver,
            done=kernel.flushed,
            cooldown_seconds=kernel.settings.flush_cooldown,
            engines=kernel.find(EngineStep),
            keep=self._keep,
        )
        self.hook = AlertmanagerHook(
            self.flush, kernel.store, kernel.machine_names, lambda: kernel.settings.hook_dry_run
        )
        self._loaded = False
        kernel.provide(Flushes, self)
        kernel.provide(AlertmanagerHook, self.hook)
        kernel.provide(FlushPart, self)

    @property
    def loaded(self) -> bool:
        return self._loaded

    async def load(self) -> Sequence[str]:
        await self.hook.resume()
        self.flusher.receipts.extend(await self._store.receipts())
        self._loaded = True
        return ()

    def start(self) -> None:
        self.flusher.resume()

    async def configure(self, settings: Settings) -> None:
        self.flusher.cooldown_seconds = settings.flush_cooldown

    async def close(self) -> None:
        await self.flusher.close()

    def receipts(self) -> Sequence[Receipt]:
        return tuple(self.flusher.receipts)

    async def flush(self, request: FlushRequest, requested_by: str) -> FlushOutcome:
        """Flush, with an audit entry before and after. Raises FlushError, StoreUnavailable."""
        kind = "plan" if request.dry_run else "forced flush" if request.force else "flush"
        description = f"{kind} of {request.target}, steps {','.join(request.steps)}, by {requested_by}"
        note = self._kernel.note if not request.dry_run else _nothing
        if not request.dry_run:
            detail = {"target": str(request.target), "steps": request.steps}
            forced = {"force": True} if request.force else {}
            await self._store.audit(requested_by, "flush.request", detail | forced)
        try:
            outcome = await self.flusher.flush(request, requested_by)
        except FlushError as error:
            log.info("%s: refused: %s", description, error)
            await note(requested_by, "flush.refused", str(error))
            raise
        except asyncio.CancelledError:
            log.info("%s: interrupted: the daemon stops", description)
            reason = f"the daemon stopped before the flush of {request.target} ended"
            await note(requested_by, "flush.interrupted", reason)
            raise
        counts = Counter(map(_outcome, outcome.receipts))
        results = ", ".join(f"{count} {name}" for name, count in counts.items())
        returned = "" if request.dry_run else f"; {human(outcome.released_bytes)} released"
        log.info("%s: %s%s", description, results, returned)
        await note(requested_by, "flush.receipts", _proof(outcome), outcome.receipts)
        self._kernel.dependencies.wake.set()  # the next frame shows the effect of the flush
        return outcome

    async def _keep(self, receipt: Receipt) -> None:
        """Store the receipt of an engine that was returned to service. The store has logged it if it cannot."""
        with suppress(StoreUnavailable):
            detail = {"engine": receipt.workload, "outcome": receipt.outcome, "reason": receipt.reason}
            await self._store.audit(receipt.requested_by, "engine.returned", detail)
            await self._store.add_receipts([receipt])


_outcome: Callable[[Receipt], str] = attrgetter("outcome")


async def _nothing(actor: str, action: str, detail: Any, receipts: Sequence[Receipt] = ()) -> None:
    """Note nothing about a plan, which changes nothing."""


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
