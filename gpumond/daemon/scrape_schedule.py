"""Prediction of scrapes from their interval, so that a page can be rendered in advance.

Performs no I/O. Times are monotonic seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

INTERVALS = (1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30, 60)
"""Scrape intervals in seconds that are recognised."""

APART_SECONDS = 0.5
"""Minimum distance of two scrapes; closer ones count as one."""

Key = TypeVar("Key")


class ScrapeSchedule(Generic[Key]):
    """Times at which each key was requested. Several scrapers may request the same key on independent schedules."""

    def __init__(self) -> None:
        self._requests: dict[Key, deque[float]] = {}

    def asked(self, key: Key, now: float) -> None:
        times = self._requests.setdefault(key, deque())
        if not times or now - times[-1] >= APART_SECONDS:
            times.append(now)
        while times[0] < now - 3 * max(INTERVALS):
            times.popleft()

    def expected(self, now: float, seconds: float) -> Iterator[Key]:
        """Yield the keys requested both one and two intervals ago, which are expected again within ``seconds``."""
        for key, times in self._requests.items():
            if any(all(_within(times, now - n * every, seconds) for n in (1, 2)) for every in INTERVALS):
                yield key


def _within(times: deque[float], begin: float, seconds: float) -> bool:
    return any(begin <= at <= begin + seconds for at in times)
