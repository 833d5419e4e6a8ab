"""Limits of requests: rate, body size, and the share of each user in a limited resource."""

from __future__ import annotations

import asyncio
import ipaddress
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

from starlette.exceptions import HTTPException
from starlette.types import Message, Receive

from gpumond.host.peer import person_uid

MAX_BODY_BYTES = 64 * 1024
FAILURES_PER_MINUTE = 10
FLUSHES_PER_MINUTE = 30
SILENCES_PER_MINUTE = 30
RECEIVER_TESTS_PER_MINUTE = 10
MAX_KEYS = 4096
CONCURRENT_REQUESTS = 4
CHANGES_AT_ONCE, CHANGES_PER_SECOND = 8, 50
"""Limits on a user's requests other than reads. Further requests wait."""
MAX_WAITING_REQUESTS = 512
MAX_PREVIEWS = 2
"""Limit of previews of rules in progress; one per user."""


class TokenBucket:
    """Token bucket per key: bursts of ``count``, refilled within ``seconds``. The least recently used keys are
    dropped."""

    def __init__(self, count: int, seconds: float, keys: int = MAX_KEYS) -> None:
        self._count, self._per_second, self._keys = count, count / seconds, keys
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait(self, key: str, now: float) -> float:
        """Return the seconds until the next request is admitted; 0 if it is admitted now. Counts nothing."""
        return max(0.0, (1.0 - self._level(key, now)) / self._per_second)

    def count(self, key: str, now: float) -> None:
        self._left[key] = self._level(key, now) - 1.0, now
        self._left.move_to_end(key)
        while len(self._left) > self._keys:
            self._left.popitem(last=False)

    def _level(self, key: str, now: float) -> float:
        released, at = self._left.get(key, (float(self._count), now))
        return min(self._count, released + (now - at) * self._per_second)


def body_too_large() -> HTTPException:
    return HTTPException(413, f"the body exceeds {MAX_BODY_BYTES} bytes", {"Connection": "close"})


def limited_body(receive: Receive) -> Receive:
    """Limit the body to ``MAX_BODY_BYTES``, whatever length its headers state."""
    received = 0

    async def receive_limited() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > MAX_BODY_BYTES:
            raise body_too_large()
        if b"\0" in message.get("body", b""):  # present in UTF-16 and UTF-32, never in JSON as UTF-8
            raise HTTPException(400, "the body isn't JSON in UTF-8")
        return message

    return receive_limited


class _Slots(asyncio.Semaphore):
    waiting = 0


class RequestSlots:
    """At most ``CONCURRENT_REQUESTS`` per user, and a queue of at most ``MAX_WAITING_REQUESTS`` more.

    A user with a thousand requests therefore delays other users no more than a user with a few.
    """

    def __init__(self) -> None:
        self._of: WeakValueDictionary[object, _Slots] = WeakValueDictionary()
        """The slots of each user with a request."""

    async def take(self, key: object) -> Callable[[], None]:
        """Wait for a slot, and return a function that releases it once. Raises 503 if the queue is full."""
        slots = self._of.get(key) or self._of.setdefault(key, _Slots(CONCURRENT_REQUESTS))
        if slots.waiting >= MAX_WAITING_REQUESTS:
            detail = f"too many requests by this user: {MAX_WAITING_REQUESTS} are already waiting"
            raise HTTPException(503, detail, {"Retry-After": "1"})
        waits = slots.locked()
        slots.waiting += waits
        try:
            await slots.acquire()
        finally:
            slots.waiting -= waits
        held = [slots]

        def release() -> None:
            if held:
                held.pop().release()

        return release


Holder = TypeVar("Holder", bound=Hashable)

LOOPBACK = "loopback"


def parse_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address, that of IPv4 where it is mapped into IPv6; None for a name."""
    try:
        ip = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(ip, "ipv4_mapped", None) or ip


def user_of(uid: int | None, address: str = "") -> str:
    """Return the user that a connection is counted for."""
    if uid is not None:
        return f"uid:{person_uid(uid)}"
    ip = parse_address(address)
    return address if ip is None else LOOPBACK if ip.is_loopback else str(ip)


class UserLimits(Generic[Holder]):
    """Amounts held by users, at most ``total`` altogether and at most ``each`` per user."""

    def __init__(self, total: int, each: int | None = None) -> None:
        self.total, self.each = total, total if each is None else each
        self.held = 0
        self._users: defaultdict[str, dict[Holder, int]] = defaultdict(dict)
        self._of: defaultdict[str, int] = defaultdict(int)

    def admits(self, user: str, amount: int = 1) -> bool:
        """Return True if ``amount`` more fits into both the total and the user's share."""
        return self.held + amount <= self.total and self.of(user) + amount <= self.each

    def add(self, user: str, holder: Holder, amount: int = 1) -> None:
        """Count ``holder``, even above the limits. A holder is counted once."""
        self.remove(user, holder)
        self._users[user][holder] = amount
        self._of[user] += amount
        self.held += amount

    def remove(self, user: str, holder: Holder) -> bool:
        """Remove a holder. Returns False if it was not counted."""
        amount = self._users.get(user, {}).pop(holder, None)
        if amount is None:
            return False
        self._of[user] -= amount
        self.held -= amount
        if not self._users[user]:
            del self._users[user], self._of[user]
        return True

    def has(self, user: str, holder: Holder) -> bool:
        return holder in self._users.get(user, ())

    def of(self, user: str) -> int:
        return self._of.get(user, 0)

    def users(self) -> list[str]:
        """Return the users with holders, largest amount first."""
        return sorted(self._users, key=self.of, reverse=True)

    def holders(self, user: str) -> tuple[Holder, ...]:
        """Return the user's holders, oldest first."""
        return tuple(self._users.get(user, ()))
