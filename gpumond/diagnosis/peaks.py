"""Peaks of live and kept memory of one process's pools, in each minute. No I/O.

Fragmentation is measured at peaks and never at an instant, because a healthy pool also appears fragmented while its use
is low.
"""

from __future__ import annotations

from typing import NamedTuple

from gpumond.facts.pools import PoolUsage
from gpumond.facts.snapshot import AgentReport
from gpumond.facts.units import MINUTE_SECONDS

MINUTES = 60


class PoolPeak(NamedTuple):
    """Peak of the minute from ``at`` on. *Kept* bytes are those that no flush returns."""

    at: float
    live: int
    kept: int


class Peaks:
    """Peaks of the last hour on one device, and times of the last retried and the last failed allocation."""

    __slots__ = ("_last", "_never", "_ooms", "_reported", "_rescues", "_retries", "failed_at", "minutes", "retried_at")

    def __init__(self, never: float) -> None:
        self.minutes: list[PoolPeak] = []  # an empty deque has 700 bytes, and few processes have an agent
        self.failed_at = self.retried_at = self._never = never
        self._last = PoolPeak(never, 0, 0)
        self._reported = self._ooms = self._retries = self._rescues = -1
        """Counters of the last report; counts from before the first report are not new."""

    def add(self, report: AgentReport, device_uuid: str, now: float) -> None:
        live = kept = ooms = retries = highest = 0
        for pool in report.pools:
            if pool.device_uuid == device_uuid and not pool.inside and pool.live_bytes is not None:
                live += pool.live_bytes
                kept += kept_bytes(pool) if pool.live_bytes else 0  # an empty pool is not fragmented
                highest += pool.peak_live_bytes or 0
                ooms += pool.ooms or 0
                retries += pool.retries or 0
        if highest > self._reported:
            if self._reported >= 0:
                # A reported peak that rose was reached since the last report, however short it was.
                live, kept = max(live, highest), max(kept, highest)
            self._reported = highest
        elif highest < self._reported:
            self._reported = highest
        if ooms > self._ooms:
            self.failed_at = now if self._ooms >= 0 else self.failed_at
            self._ooms = ooms
        rescues = report.program.oom_rescues
        if rescues > self._rescues >= 0:
            self.failed_at = self._never  # `retry_on_oom` succeeded: the errors before it did not end the program
        self._rescues = rescues
        if retries > self._retries:
            self.retried_at = now if self._retries >= 0 else self.retried_at
            self._retries = retries
        last = self._last
        if now - last.at >= MINUTE_SECONDS:
            self._last = PoolPeak(now, live, kept)
            self.minutes.append(self._last)
            del self.minutes[:-MINUTES]
        elif live > last.live or kept > last.kept:
            self._last = self.minutes[-1] = PoolPeak(last.at, max(last.live, live), max(last.kept, kept))


FRAGMENTED_FROM = 0.05
"""Share of the device that a pool must keep before its fragmentation is reported."""


def kept_bytes(pool: PoolUsage) -> int:
    """Return the bytes that no flush returns: held less reclaimable, that is live and stranded.

    An arena that never returns memory is no sign of fragmentation: it keeps its memory in any case. Nor is a pool with
    unknown live bytes.
    """
    live, kept = pool.live_bytes, pool.held_bytes - pool.reclaimable.likely
    if live is None:
        return kept
    if pool.reclaimable.exactness == "not_releasable":
        return live
    return kept if kept > live else live  # each tick calls it for each pool, and `max` is slower


def split_share(peak_live: float, peak_kept: float) -> float:
    """Return 1 - peak live / peak kept over one window; 0 for a pool that keeps nothing."""
    return 1 - min(1.0, peak_live / peak_kept) if peak_kept else 0.0
