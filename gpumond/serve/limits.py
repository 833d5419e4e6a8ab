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
FAILED_SIGN_INS_PER_MINUTE = 10
FLUSHES_PER_MINUTE = 30
SILENCES_PER_MINUTE = 30
RECEIVER_TESTS_PER_MINUTE = 10
MAX_KEYS = 4096
MAX_CONCURRENT_REQUESTS = 4
CHANGES_AT_ONCE, CHANGES_PER_SECOND = 8, 50
"""Limits on a user's requests other than reads. Further requests wait."""
MAX_WAITING_REQUESTS = 512
MAX_PREVIEWS = 2
"""Limit of previews of rules in progress; one per user."""


class TokenBucket:
    """Token bucket per key: bursts of ``capacity``, refilled within ``seconds``. The least recently used keys are
    dropped."""

    def __init__(self, capacity: int, seconds: float, max_keys: int = MAX_KEYS) -> None:
        self._capacity, self._per_second, self._max_keys = capacity, capacity / seconds, max_keys
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """By key: the requests that it may still send, and when this was so."""

    def wait_seconds(self, key: str, now: float) -> float:
        """Return the seconds until the next request is admitted; 0 if it is admitted now."""
        return max(0.0, (1.0 - self._level(key, now)) / self._per_second)

    def spend(self, key: str, now: float) -> None:
        """Count a request."""
        self._levels[key] = self._level(key, now) - 1.0, now
        self._levels.move_to_end(key)
        while len(self._levels) > self._max_keys:
            self._levels.popitem(last=False)

    def _level(self, key: str, now: float) -> float:
        level, at = self._levels.get(key, (float(self._capacity), now))
        return min(self._capacity, level + (now - at) * self._per_second)


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
    """At most ``MAX_CONCURRENT_REQUESTS`` per user, and a queue of at most ``MAX_WAITING_REQUESTS`` more.

    A user with a thousand requests therefore delays other users no more than a user with a few.
    """

    def __init__(self) -> None:
        self._slots: WeakValueDictionary[object, _Slots] = WeakValueDictionary()
        """The slots of each user with a request."""

    async def take(self, key: object) -> Callable[[], None]:
        """Wait for a slot, and return a function that releases it once. Raises 503 if the queue is full."""
        slots = self._slots.get(key) or self._slots.setdefault(key, _Slots(MAX_CONCURRENT_REQUESTS))
        if slots.waiting >= MAX_WAITING_REQUESTS:
            detail = f"too many requests by this user: {MAX_WAITING_REQUESTS} are already waiting"
            raise HTTPException(503, detail, {"Retry-After": "1"})
        has_to_wait = slots.locked()
        slots.waiting += has_to_wait
        try:
            await slots.acquire()
        finally:
            slots.waiting -= has_to_wait
        unreleased = [slots]

        def release() -> None:
            if unreleased:
                unreleased.pop().release()

        return release


Claim = TypeVar("Claim", bound=Hashable)

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


class SharedResource(Generic[Claim]):
    """A resource that users share. Claims take at most ``total`` of it, and those of one user at most ``per_user``."""

    def __init__(self, total: int, per_user: int | None = None) -> None:
        self.total, self.per_user = total, total if per_user is None else per_user
        self.used = 0
        self._claims: defaultdict[str, dict[Claim, int]] = defaultdict(dict)
        self._used_by: defaultdict[str, int] = defaultdict(int)

    def admits(self, user: str, amount: int = 1) -> bool:
        """Return True if ``amount`` more fits into both the total and the user's share."""
        return self.used + amount <= self.total and self.used_by(user) + amount <= self.per_user

    def add(self, user: str, claim: Claim, amount: int = 1) -> None:
        """Count a claim, even above the limits. Each claim is counted once."""
        self.remove(user, claim)
        self._claims[user][claim] = amount
        self._used_by[user] += amount
        self.used += amount

    def remove(self, user: str, claim: Claim) -> bool:
        """Remove a claim. Returns False if it was not counted."""
        amount = self._claims.get(user, {}).pop(claim, None)
        if amount is None:
            return False
        self._used_by[user] -= amount
        self.used -= amount
        if not self._claims[user]:
            del self._claims[user], self._used_by[user]
        return True

    def has(self, user: str, claim: Claim) -> bool:
        return claim in self._claims.get(user, ())

    def used_by(self, user: str) -> int:
        return self._used_by.get(user, 0)

    def users(self) -> list[str]:
        """Return the users with claims, largest amount first."""
        return sorted(self._claims, key=self.used_by, reverse=True)

    def claims(self, user: str) -> tuple[Claim, ...]:
        """Return the user's claims, oldest first."""
        return tuple(self._claims.get(user, ()))
