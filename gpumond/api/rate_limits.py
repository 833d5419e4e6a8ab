"""Bounds of requests: how often, how many of a user at once, and the size of a body."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable

from fastapi import HTTPException
from starlette.types import Message, Receive

MAX_BODY_BYTES = 64 * 1024
FAILURES_PER_MINUTE = 10
FLUSHES_PER_MINUTE = 30
KEYS = 4096
WORKED_ON = 4
CHANGES_AT_ONCE, CHANGES_PER_SECOND = 8, 200
"""Requests of a user other than reads; one beyond them waits."""
WAITING = 512


class TokenBucket:
    """``count`` at once for each key, and as many again within ``seconds``. Keys not seen for longest are forgotten."""

    def __init__(self, count: int, seconds: float, keys: int = KEYS) -> None:
        self._count, self._per_second, self._keys = count, count / seconds, keys
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait(self, key: str, now: float) -> float:
        """Seconds until one more is admitted; 0 if it is now. Counts nothing."""
        return max(0.0, (1.0 - self._level(key, now)) / self._per_second)

    def count(self, key: str, now: float) -> None:
        self._left[key] = self._level(key, now) - 1.0, now
        self._left.move_to_end(key)
        while len(self._left) > self._keys:
            self._left.popitem(last=False)

    def _level(self, key: str, now: float) -> float:
        left, at = self._left.get(key, (float(self._count), now))
        return min(self._count, left + (now - at) * self._per_second)


def too_large() -> HTTPException:
    return HTTPException(413, f"a body of more than {MAX_BODY_BYTES} bytes", {"Connection": "close"})


def bounded(receive: Receive) -> Receive:
    """The same, until more has come than a body may have, whatever its headers say of its length."""
    received = 0

    async def receive_so_much() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > MAX_BODY_BYTES:
            raise too_large()
        if b"\0" in message.get("body", b""):  # UTF-16 and UTF-32 have it, JSON in UTF-8 never
            raise HTTPException(400, "the body is not JSON in UTF-8")
        return message

    return receive_so_much


class Places:
    """At most ``each`` requests of a user are worked on at once; as many as ``waiting`` more wait, in order.

    A user's thousand requests so take no more of the event loop between two requests of another than a few do.
    """

    def __init__(self, each: int = WORKED_ON, waiting: int = WAITING) -> None:
        self._each, self._waiting = each, waiting
        self._taken: Counter[object] = Counter()
        self._queues: dict[object, deque[asyncio.Future[None]]] = {}

    async def take(self, key: object) -> Callable[[], None]:
        """Waits for a place; the result gives it back, once. Raises the 503 if too many wait."""
        if self._taken[key] < self._each:
            self._taken[key] += 1
        else:
            queue = self._queues.setdefault(key, deque())
            if len(queue) >= self._waiting:
                raise HTTPException(503, f"{self._waiting} requests of this user wait already", {"Retry-After": "1"})
            place = asyncio.get_running_loop().create_future()
            queue.append(place)
            try:
                await place
            except asyncio.CancelledError:
                if place.done() and not place.cancelled():
                    self._leave(key)
                raise HTTPException(503, "the daemon is shutting down", {"Connection": "close"}) from None
        left = False

        def leave() -> None:
            nonlocal left
            if not left:
                left = True
                self._leave(key)

        return leave

    def _leave(self, key: object) -> None:
        queue = self._queues.get(key, deque())
        while queue:
            place = queue.popleft()
            if not place.done():
                place.set_result(None)
                return
        self._queues.pop(key, None)
        self._taken[key] -= 1
        if not self._taken[key]:
            del self._taken[key]
