"""Rate limit for messages and commands of the daemon."""

from __future__ import annotations


class RateLimit:
    """A token bucket: ``burst`` at once, then one every ``seconds``. ``now`` is any monotonic clock."""

    def __init__(self, burst: int, seconds: float) -> None:
        self._burst, self._seconds = burst, seconds
        self._left, self._filled_at = float(burst), float("-inf")

    def allows(self, now: float) -> bool:
        """Return whether one more is within the rate; if so, count it."""
        self._left = min(self._burst, self._left + (now - self._filled_at) / self._seconds)
        self._filled_at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True
