"""Who scrapes regularly will do so again: its page can be ready when it comes. Pure; times are monotonic seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

INTERVALS = (1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30, 60)
"""Between two scrapes of one scraper."""

APART_SECONDS = 0.5
"""Scrapes that follow each other more closely are one to us."""

Key = TypeVar("Key")


class ScrapeSchedule(Generic[Key]):
    """What was asked for, and when. Several scrapers may ask for the same, each at its own moments."""

    def __init__(self) -> None:
        self._asked: dict[Key, deque[float]] = {}

    def asked(self, key: Key, now: float) -> None:
        times = self._asked.setdefault(key, deque())
        if not times or now - times[-1] >= APART_SECONDS:
            times.append(now)
        while times[0] < now - 3 * max(INTERVALS):
            times.popleft()

    def expected(self, now: float, seconds: float) -> Iterator[Key]:
        """What will be asked for within ``seconds``: it was so one interval before, and two."""
        for key, times in self._asked.items():
            if any(all(_within(times, now - n * every, seconds) for n in (1, 2)) for every in INTERVALS):
                yield key


def _within(times: deque[float], begin: float, seconds: float) -> bool:
    return any(begin <= at <= begin + seconds for at in times)
