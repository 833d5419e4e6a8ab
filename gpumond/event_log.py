"""Log of the newest events, and notification of its readers. Readers never block the writer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from gpumond.facts.frame import Alert, Frame
from gpumond.facts.pools import Receipt
from gpumond.facts.snapshot import AgentReport
from gpumond.tick.events import Event, EventState, advance_events, after

KEPT = 1000


class EventLog:
    """Log of the newest ``kept`` events, on one event loop.

    Ids start at 1000 times the unix time of the daemon's start, so they increase across restarts.
    """

    def __init__(self, started_at: float, kept: int = KEPT) -> None:
        self._state = EventState(last_id=int(started_at) * 1000, since=started_at)
        self._receipts: list[Receipt] = []
        self._events: deque[Event] = deque(maxlen=kept)
        self._published = asyncio.Event()

    def flushed(self, receipt: Receipt) -> None:
        """Record a receipt; its event is published with the next frame."""
        self._receipts.append(receipt)

    def publish(
        self,
        frame: Frame,
        raised: Sequence[Alert] = (),
        resolved: Sequence[Alert] = (),
        departed: Sequence[AgentReport] = (),
    ) -> tuple[Event, ...]:
        """Publish the events between the previous frame and this one."""
        self._state, events = advance_events(self._state, frame, raised, resolved, self._receipts, departed)
        self._receipts.clear()
        self._events.extend(events)
        if events:
            self._published.set()  # wakes current waiters; later ones wait for the next event
            self._published = asyncio.Event()
        return events

    @property
    def last_id(self) -> int:
        return self._state.last_id

    def newest(self) -> tuple[Event, ...]:
        return tuple(self._events)

    def after(self, last_id: int) -> tuple[Event, ...]:
        """Return the events after ``last_id`` that are still kept."""
        return after(self._events, last_id)

    @property
    def before_id(self) -> int:
        """Id of the last event that is no longer kept, or that a previous daemon published."""
        return self._events[0].id - 1 if self._events else self.last_id

    async def wait(self, seconds: float) -> bool:
        """Wait for new events. Returns False on timeout."""
        published = self._published
        try:
            await asyncio.wait_for(published.wait(), seconds)
        except asyncio.TimeoutError:
            return False
        return True
