"""The daemon's newest events, and who waits for the next one. Nobody who reads can hold up who writes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from gpumond.engine.events import Event, EventState, advance_events, after
from gpumond.model.frame import Alert, Frame
from gpumond.model.pools import Receipt
from gpumond.model.snapshot import AgentReport

KEPT = 1000


class EventLog:
    """Of the newest ``kept`` events, on one event loop.

    Ids begin at a thousand for each second of unix time until the daemon's start: they grow over restarts too.
    """

    def __init__(self, started_at: float, kept: int = KEPT) -> None:
        self._watch = EventState(int(started_at) * 1000, started_at)
        self._receipts: list[Receipt] = []
        self._events: deque[Event] = deque(maxlen=kept)
        self._news = asyncio.Event()

    def flushed(self, receipt: Receipt) -> None:
        """Is told with the next frame."""
        self._receipts.append(receipt)

    def follow(
        self,
        frame: Frame,
        raised: Sequence[Alert] = (),
        resolved: Sequence[Alert] = (),
        departed: Sequence[AgentReport] = (),
    ) -> tuple[Event, ...]:
        """What happened between the frame before and this one; it is told to all who wait."""
        self._watch, events = advance_events(self._watch, frame, raised, resolved, self._receipts, departed)
        self._receipts.clear()
        self._events.extend(events)
        if events:
            self._news.set()  # wakes who waits now; who comes later waits for the next
            self._news = asyncio.Event()
        return events

    @property
    def last_id(self) -> int:
        return self._watch.last_id

    def newest(self) -> tuple[Event, ...]:
        return tuple(self._events)

    def after(self, last_id: int) -> tuple[Event, ...]:
        """What somebody has missed since, as far as it is kept."""
        return after(self._events, last_id)

    @property
    def before_id(self) -> int:
        """The last event that is kept no longer, or was another daemon's."""
        return self._events[0].id - 1 if self._events else self.last_id

    async def wait(self, seconds: float) -> bool:
        """Until there are new events; False if there were none in time."""
        news = self._news
        try:
            await asyncio.wait_for(news.wait(), seconds)
        except asyncio.TimeoutError:
            return False
        return True
