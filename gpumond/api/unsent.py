"""Accounting of response bytes that are queued for slow readers. Performs no I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpumond.api.shares import Shares

MAX_UNSENT_BYTES = 32 << 20
MAX_UNSENT_BYTES_OF_USER = 16 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Sending:
    """One answer to one reader. ``drop`` closes the connection."""

    user: str
    body: bytes
    drop: Callable[[], object]


class Unsent:
    """Limits queued bytes in total and per user. A body shared by several responses is counted once.

    Above a limit, the user with the most bytes loses the readers of its oldest body. The newest body is always sent,
    because a response larger than the limit could otherwise never be read.
    """

    def __init__(self, total: int = MAX_UNSENT_BYTES, each: int = MAX_UNSENT_BYTES_OF_USER) -> None:
        self._total = total
        self._shares: Shares[int] = Shares(total, each)
        self._readers: dict[tuple[str, int], dict[Sending, None]] = {}
        self._bodies: dict[int, int] = {}
        self.bytes = self.answers = 0

    def begin(self, user: str, body: bytes, drop: Callable[[], object]) -> Sending:
        """Count a response until ``end``; drop others if they exceed a limit."""
        sending = Sending(user, body, drop)
        readers = self._readers.setdefault((user, id(body)), {})
        if not readers:
            self._shares.add(user, id(body), len(body))
            self._bodies[id(body)] = self._bodies.get(id(body), 0) + 1
            self.bytes += len(body) if self._bodies[id(body)] == 1 else 0
        readers[sending] = None
        self.answers += 1
        self._make_room(user, id(body))
        return sending

    def end(self, sending: Sending) -> None:
        """Stop counting a response that has been sent or dropped."""
        key = sending.user, id(sending.body)
        readers = self._readers.get(key, {})
        if readers.pop(sending, sending) is None:
            self.answers -= 1
            if not readers:
                self._forget(*key, len(sending.body))

    def _make_room(self, user: str, newest: int) -> None:
        while self._shares.of(user) > self._shares.each and self._drop_oldest(user, newest):
            pass
        while self.bytes > self._total and any(self._drop_oldest(other, newest) for other in self._shares.users()):
            pass

    def _drop_oldest(self, user: str, newest: int) -> bool:
        body = next((body for body in self._shares.holders(user) if body != newest), None)
        if body is None:
            return False
        for sending in tuple(self._readers[user, body]):
            self.end(sending)
            sending.drop()
        return True

    def _forget(self, user: str, body: int, size: int) -> None:
        del self._readers[user, body]
        self._shares.remove(user, body)
        self._bodies[body] -= 1
        if not self._bodies[body]:
            del self._bodies[body]
            self.bytes -= size
