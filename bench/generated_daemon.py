"""The page and its stream over generated frames, one a second.

python -m bench.generated_daemon PORT DEVICES PROCESSES
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import uvicorn

from bench.live import Machine
from gpumond.core import Core
from gpumond.diagnosis.diagnosis import Diagnosis
from gpumond.events import EventLog
from gpumond.features import routers
from gpumond.host.machine import reduce_garbage_collection
from gpumond.host.tasks import background_task
from gpumond.serve.authentication import Tokens
from gpumond.serve.deferred_app import DeferredApp

CHANGING = 0.1
"""Share of the processes whose memory changes in a second."""
FRAMES = 8
"""Frames that are generated before the start, and repeated with later times: their generation takes longer than a tick
of a daemon."""


class GeneratedView:
    """The attributes of the daemon that the page and its stream read."""

    def __init__(self, machine: Machine) -> None:
        self._frames, self._seq, self._published = [machine.frame() for _ in range(FRAMES)], 0, asyncio.Event()
        self._diagnosis, self.events = Diagnosis(), EventLog(1.0)
        self.history = self._diagnosis.history
        self._take()

    def _take(self) -> None:
        self._seq += 1
        frame, seconds = self._frames[self._seq % FRAMES], float(self._seq)
        snapshot = replace(frame.snapshot, seq=self._seq, taken_at=1e9 + seconds, elapsed_seconds=seconds)
        self.frame = replace(frame, snapshot=snapshot)
        self._diagnosis.add(snapshot)
        self.responses: dict[str, bytes] = {}

    async def await_frame(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._published.wait(), seconds)
        except asyncio.TimeoutError:
            return False
        return True

    async def run(self) -> None:
        while True:
            await asyncio.sleep(1)
            self._take()
            self._published.set()
            self._published = asyncio.Event()


def main() -> None:
    port, devices, processes = map(int, sys.argv[1:])
    view = GeneratedView(Machine(devices, processes, CHANGING))

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        async with background_task(view.run()):
            yield

    reduce_garbage_collection()  # as a daemon does
    app: Any = DeferredApp(cast("Core", view), Tokens("secret"), lifespan, routers)
    # A stream that a reader keeps open would delay the end for ever.
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", timeout_graceful_shutdown=1)


if __name__ == "__main__":
    main()
