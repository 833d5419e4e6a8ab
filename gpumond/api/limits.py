"""How often, and how much: token buckets for callers and addresses, and the size of a body."""

from __future__ import annotations

from collections import OrderedDict

from fastapi import HTTPException
from starlette.types import Message, Receive

MAX_BODY_BYTES = 64 * 1024
FAILURES_PER_MINUTE = 10
FLUSHES_PER_MINUTE = 30
KEYS = 4096


class Rate:
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
        return message

    return receive_so_much
