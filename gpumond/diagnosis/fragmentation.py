"""How split up a pool is: judged at its peaks, never from an instant. Pure.

At a moment of low use a healthy pool looks just as split up; at its peak it is not.
"""

from __future__ import annotations

from gpumond.model.pools import PoolUsage


def kept_bytes(pool: PoolUsage) -> int:
    """What no flush returns: held less reclaimable, that is live and stranded.

    An arena that never returns anything is no sign of it: it keeps what it took, split up or not.
    """
    if pool.reclaimable.exactness == "not_releasable":
        return pool.live_bytes
    return max(pool.live_bytes, pool.held_bytes - pool.reclaimable.likely)


def split_share(peak_live: float, peak_kept: float) -> float:
    """1 - peak live / peak kept over one window; 0 for a pool that keeps nothing."""
    return 1 - min(1.0, peak_live / peak_kept) if peak_kept else 0.0
