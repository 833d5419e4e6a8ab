"""Silences in the daemon: they mark the alerts of each frame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpumond.features.silences.silences import Silences
from gpumond.kernel import Kernel, Part, Silencing, Tick


class SilencesPart(Part):
    table = "silences"

    def __init__(self, kernel: Kernel) -> None:
        self._telemetry = kernel.telemetry
        self.silences = Silences(kernel.store, kernel.clock.wall)
        kernel.provide(Silences, self.silences)
        kernel.provide(Silencing, self.silences)

    @property
    def loaded(self) -> bool:
        return self.silences.loaded

    async def load(self) -> Sequence[str]:
        return await self.silences.load()

    def conclude(self, tick: Tick) -> Tick:
        frame = tick.frame
        marked = replace(frame, alerts=self.silences.mark(frame.alerts), silences=self.silences.current())
        return replace(tick, frame=marked)

    def act(self, tick: Tick) -> None:
        self._telemetry.count_silences(map(self.silences.state, self.silences.current()))
