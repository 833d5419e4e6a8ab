"""Declared serving engines in the daemon: their state is part of each snapshot."""

from __future__ import annotations

from dataclasses import replace

from gpumond.config.settings import Settings
from gpumond.facts.snapshot import Snapshot
from gpumond.features.engines.flush_step import EngineFlusher
from gpumond.features.engines.poller import Engines
from gpumond.kernel import EngineStep, Kernel, Part


class EnginesPart(Part):
    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._engines = kernel.find(Engines) or Engines()
        kernel.provide(Engines, self._engines)
        kernel.provide(EngineStep, EngineFlusher(self._engines, kernel.read_driver))

    def start(self) -> None:
        self._engines.configure(self._kernel.settings.engines)
        self._engines.start(self._kernel.gpu_processes)

    def observe(self, snapshot: Snapshot) -> Snapshot:
        return replace(snapshot, engines=self._engines.readings())

    async def configure(self, settings: Settings) -> None:
        self._engines.configure(settings.engines)

    async def close(self) -> None:
        await self._engines.close()
