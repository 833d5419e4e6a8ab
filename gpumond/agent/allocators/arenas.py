"""Pools that keep all memory until the process ends: the arenas of TensorFlow and XLA."""

from __future__ import annotations

from collections.abc import Sequence

from gpumond.facts.pools import PoolUsage, Reclaimable, StepResult

NOTHING = Reclaimable(0, 0, 0, "not_releasable")


def usage(
    allocator: str, uuid: str, live: int, held: int | None, peak: int | None = None, inside: str | None = None
) -> PoolUsage:
    """Return the pool of an arena. ``held`` is None where the library does not report it."""
    known = held is not None and held >= live
    most = held if held is not None and known else live
    return PoolUsage(
        allocator=allocator,
        device_uuid=uuid,
        live_bytes=live,
        held_bytes=most,
        reclaimable=NOTHING,
        stranded_bytes=most - live,
        inside=inside,
        peak_live_bytes=peak,
        held_known=known,
    )


def kept(allocator: str, pools: Sequence[PoolUsage], steps: Sequence[str]) -> Sequence[StepResult]:
    """Return the result of a flush of arenas: no bytes, and the reason."""
    step = next((step for step in ("cache", "trim") if step in steps), None)
    if step is None or not pools:
        return ()
    counter = next((pool.inside for pool in pools if pool.inside), None)
    if counter:
        why = f"{counter} counts and releases its memory"
    else:
        why = f"{allocator} keeps its memory until the program ends"
    return (StepResult(step, 0, 0.0, why),)
