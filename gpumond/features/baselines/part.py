"""Baselines in the daemon: recordings follow its frames."""

from __future__ import annotations

from gpumond.facts.pools import Receipt
from gpumond.features.baselines.recordings import BaselineService
from gpumond.kernel import Kernel, Part, Tick


class BaselinesPart(Part):
    def __init__(self, kernel: Kernel) -> None:
        self._service = BaselineService(kernel.store)
        kernel.provide(BaselineService, self._service)

    def act(self, tick: Tick) -> None:
        self._service.add(tick.frame)

    def flushed(self, receipt: Receipt) -> None:
        self._service.flushed(receipt)

    async def close(self) -> None:
        await self._service.close()
