"""Sums and details of the snapshot that an agent takes at an out-of-memory error. No I/O."""

from __future__ import annotations

from gpumond.model.program import Oom, OomPool
from gpumond.model.units import human

Details = tuple[tuple[str, int | float | str], ...]


def amounts(oom: Oom) -> str:
    """Return the live, cached and stranded bytes of the device that was full as text."""
    live, cached, stranded = _sums(oom)
    return f"{human(live)} live, {human(cached)} cached, {human(stranded)} stranded"


def oom_details(oom: Oom) -> Details:
    """Return the known values for the details of an event."""
    live, cached, stranded = _sums(oom)
    largest = [pool.largest_free_bytes for pool in _concerned(oom) if pool.largest_free_bytes is not None]
    known: list[tuple[str, int | float | str | None]] = [
        ("number", oom.number),
        ("seen", oom.seen),
        ("scope", oom.scope or None),
        ("request_bytes", oom.request_bytes),
        ("live_bytes", live),
        ("cached_bytes", cached),
        ("stranded_bytes", stranded),
        ("largest_free_bytes", max(largest, default=None)),
        ("occurred_at", oom.at),
        *((f"kept_bytes {scope.name}", scope.kept_bytes) for scope in oom.scopes),
    ]
    return tuple((name, value) for name, value in known if value is not None)


def _sums(oom: Oom) -> tuple[int, int, int]:
    pools = _concerned(oom)
    return (
        sum(pool.live_bytes for pool in pools),
        sum(pool.cached_bytes for pool in pools),
        sum(pool.stranded_bytes for pool in pools),
    )


def _concerned(oom: Oom) -> list[OomPool]:
    """Return the pools of the device that was full; all of them if the device is unknown."""
    return [pool for pool in oom.pools if oom.device_uuid in (None, pool.device_uuid)]
