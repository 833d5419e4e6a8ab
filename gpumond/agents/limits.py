"""Limits of the agents' socket, and what each user uses of them: the person who owns a uid (``gpumond.host.users``)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the socket, some by user; a user beyond the budget is read more slowly, without cost to others."""

    peers: int = 8000
    peers_per_uid: int = 128
    pending: int = 512
    """Connections without a hello; beyond this number none is accepted for a moment."""
    pending_per_uid: int = 16
    """Connections of a user beyond this number are accepted and closed at once, so that they do not fill the queue."""
    hello_seconds: float = 2.0
    shared_hello_seconds: float = 0.5
    """The same for a user who has other connections without a hello."""
    message_seconds: float = 5.0
    idle_seconds: float = 60.0
    answer_seconds: float = 0.5
    """Longer than a flush may take, so that an agent can report why it failed."""
    stale_seconds: float = 15.0
    """Age in seconds at which a report is no longer used."""
    messages_per_second: int = 512
    bytes_per_second: int = 2 << 20
    reserved_descriptors: int = 64


class Budget:
    """Token bucket of messages and bytes for one user."""

    def __init__(self, limits: Limits, now: float) -> None:
        self._limits, self._filled_at = limits, now
        self.messages, self.bytes = float(limits.messages_per_second), float(limits.bytes_per_second)

    def wait(self, now: float) -> float:
        """Return the seconds until this user may be read again; 0 if at once."""
        limits, passed = self._limits, now - self._filled_at
        self._filled_at = now
        self.messages = min(limits.messages_per_second, self.messages + passed * limits.messages_per_second)
        self.bytes = min(limits.bytes_per_second, self.bytes + passed * limits.bytes_per_second)
        return max(0.0, -self.messages / limits.messages_per_second, -self.bytes / limits.bytes_per_second)


class UserUsage:
    """Connections and budgets of all users. ``pending`` connections have sent no hello."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._connections: Counter[int] = Counter()
        self._pending: Counter[int] = Counter()
        self._budgets: dict[int, Budget] = {}

    def admits(self, user: int) -> bool:
        limits = self._limits
        return self._connections[user] < limits.peers_per_uid and self._pending[user] < limits.pending_per_uid

    def add(self, user: int, now: float) -> Budget:
        """Count a new connection, which is pending. Returns the user's budget."""
        self._connections[user] += 1
        self._pending[user] += 1
        return self._budgets.setdefault(user, Budget(self._limits, now))

    def remove(self, user: int) -> None:
        self._connections[user] -= 1
        if not self._connections[user]:
            del self._connections[user]

    def pending(self, user: int | None = None) -> int:
        """Return the number of pending connections of a user, or of all."""
        return self._pending.total() if user is None else self._pending[user]

    def no_longer_pending(self, user: int) -> None:
        self._pending[user] -= 1
        if not self._pending[user]:
            del self._pending[user]

    def forget(self, now: float) -> None:
        """Forget the full budgets of users without a connection."""
        for user in [user for user in self._budgets if user not in self._connections]:
            if self._budgets[user].wait(now) == 0:
                del self._budgets[user]
