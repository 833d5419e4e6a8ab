"""Thread that keeps a device busy for a share of the time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

SLICE_SECONDS = 0.02
"""Length of one period of work; utilisation counters sample a sixth of a second or more."""


class Burner:
    """The thread. ``work(amount)`` keeps the device busy for a time that grows with the amount, and blocks."""

    def __init__(self, work: Callable[[int], None]) -> None:
        self._work = work
        self._ratio = 0.0
        self._change = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def set(self, ratio: float) -> None:
        self._ratio = ratio
        if ratio > 0 and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gpumond-load", daemon=True)
            self._thread.start()
        self._change.set()

    def stop(self) -> None:
        self._stopping = True
        self._change.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        amount = 1000
        while not self._stopping:
            ratio = self._ratio
            if ratio <= 0:
                self._change.wait()
                self._change.clear()
                continue
            started = time.perf_counter()
            self._work(amount)
            took = max(1e-6, time.perf_counter() - started)
            amount = max(1, int(amount * min(2.0, max(0.5, SLICE_SECONDS / took))))
            self._change.wait(took * (1 / ratio - 1))
            self._change.clear()
