"""Instruments in the daemon: it asks a program with a leak for the lines that keep the memory."""

from __future__ import annotations

from gpumond.features.instruments.inquiry import LeakInquiry
from gpumond.kernel import Kernel, Part, Tick


class InstrumentsPart(Part):
    def __init__(self, kernel: Kernel) -> None:
        self._leaks = LeakInquiry(kernel.programs)

    def act(self, tick: Tick) -> None:
        self._leaks.consider(tick.frame)

    async def close(self) -> None:
        await self._leaks.close()
