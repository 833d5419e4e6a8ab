"""Quotas in the daemon: the quota of each process, limits in programs, and requests for memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpumond.config.settings import Settings
from gpumond.facts.process import ProcessKey
from gpumond.facts.snapshot import Snapshot
from gpumond.features.quotas.admissions import Admissions
from gpumond.features.quotas.quotas import QuotaLimits, assign_quotas
from gpumond.features.quotas.registry import QuotaRegistry
from gpumond.host.machine import find_process
from gpumond.kernel import Flushes, Grants, Kernel, Part, Suspends, Tick


class QuotasPart(Part):
    table = "quotas"

    def __init__(self, kernel: Kernel) -> None:
        self.registry = QuotaRegistry(kernel.settings.quotas, kernel.store)
        self._limits = QuotaLimits(kernel.commands.set_limit)
        kernel.provide(QuotaRegistry, self.registry)

    @property
    def loaded(self) -> bool:
        return self.registry.loaded

    async def load(self) -> Sequence[str]:
        return await self.registry.load()

    def observe(self, snapshot: Snapshot) -> Snapshot:
        return replace(snapshot, quotas=assign_quotas(self.registry.table, snapshot.devices, snapshot.reports))

    def act(self, tick: Tick) -> None:
        if self.registry.loaded:  # until then, the limit of an unknown quota may be that of a stored one
            self._limits.execute(tick.frame.snapshot)

    async def configure(self, settings: Settings) -> None:
        self.registry.configure(settings.quotas)

    async def close(self) -> None:
        await self._limits.close()


class AdmissionsPart(Part):
    table = "admissions"

    def __init__(self, kernel: Kernel) -> None:
        self.admissions = Admissions(
            kernel.get(Flushes).flush,
            lambda: kernel.settings.reclaim,
            find_process,
            kernel.clock.monotonic,
            kernel.store,
            self._suspend,
        )
        kernel.provide(Admissions, self.admissions)
        kernel.provide(Grants, self.admissions)
        self._kernel = kernel

    @property
    def loaded(self) -> bool:
        return self.admissions.loaded

    async def load(self) -> Sequence[str]:
        return await self.admissions.load()

    async def _suspend(self, process: ProcessKey, requested_by: str) -> None:
        suspends = self._kernel.find(Suspends)
        if suspends is not None:
            await suspends.suspend_idle(process, requested_by)

    def act(self, tick: Tick) -> None:
        self.admissions.execute(tick.frame.snapshot)

    async def close(self) -> None:
        await self.admissions.close()
