"""Per-user shares of a limited resource.

A user is the person who owns the uid of a Unix socket or loopback connection (``gpumond.host.users``), else the
address. Loopback addresses without a known uid are one user, because a local program can use any source address of
127/8.
"""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Hashable
from typing import Generic, TypeVar

from gpumond.host.users import person_of

Holder = TypeVar("Holder", bound=Hashable)

LOOPBACK = "loopback"


def user_of(uid: int | None, address: str = "") -> str:
    """Return the user that a connection is counted for."""
    if uid is not None:
        return f"uid:{person_of(uid)}"
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    ip = getattr(ip, "ipv4_mapped", None) or ip
    return LOOPBACK if ip.is_loopback else str(ip)


class Shares(Generic[Holder]):
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
