"""Fragmentation of a pool, measured at its peaks and never at an instant. No I/O.

At a moment of low use a healthy pool looks as fragmented as any; at its peak it does not.
"""

from __future__ import annotations

from gpumond.model.pools import PoolUsage

FRAGMENTED_FROM = 0.05
"""Share of the device that a pool must keep before its fragmentation is reported."""


def kept_bytes(pool: PoolUsage) -> int:
    """Return the bytes that no flush returns: held less reclaimable, that is live and stranded.

    An arena that never returns memory is no sign of fragmentation: it keeps its memory in any case.
    """
    if pool.reclaimable.exactness == "not_releasable":
        return pool.live_bytes
    return max(pool.live_bytes, pool.held_bytes - pool.reclaimable.likely)


def split_share(peak_live: float, peak_kept: float) -> float:
    """Return 1 - peak live / peak kept over one window; 0 for a pool that keeps nothing."""
    return 1 - min(1.0, peak_live / peak_kept) if peak_kept else 0.0
