"""The driver's default memory pools, one for each device, which every ``cudaMallocAsync`` of the process shares.

The statistics of PyTorch's cudaMallocAsync backend are those of this pool, so that PyTorch counts it where that backend
is in use, and this adapter elsewhere. Other libraries report what they take from it (CuPy's MemoryAsyncPool,
TensorFlow, RMM's view) as ``inside`` the allocator that counts it: `counted_by` names it, and `arena` builds the pool
of a library that returns nothing by itself.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence

from gpumond.agent import cuda
from gpumond.agent.allocators import AllocatorAdapter, FlushRefused
from gpumond.agent.allocators.python_owners import retained_by_trim
from gpumond.facts.pools import PoolUsage, Reclaimable, StepResult

SEARCH_SECONDS = 0.05
"""Lifetime of a search without result: one report requests the adapters several times."""

_search_at = 0.0


class MempoolsAdapter(AllocatorAdapter):
    name = "mempool"

    def framework(self) -> str:
        return f"cuda {cuda.version()}"

    def read(self, exact: bool = False) -> Sequence[PoolUsage]:
        return tuple(
            cached("mempool", cuda.device_uuid(ordinal) or "", used, reserved)
            for ordinal, _, reserved, used in _pools()
        )

    def retained_bytes(self) -> Mapping[str, int]:
        return retained_by_trim((ordinal, used) for ordinal, _, _, used in _pools())

    def check(self) -> None:
        if reason := cuda.refusal():
            raise FlushRefused(reason)

    def flush(self, steps: Sequence[str]) -> Sequence[StepResult]:
        """Wait until each device is idle, then trim its pool: freed but pending bytes would stay."""
        self.check()
        if "trim" not in steps:
            return ()
        started, released = time.perf_counter(), 0
        for ordinal, pool, reserved, _ in list(_pools()):
            if cuda.trim(ordinal, pool) and (after := cuda.pool_bytes(pool)):
                released += max(0, reserved - after[0])
        return (StepResult("trim", released, time.perf_counter() - started),)


def adapter() -> MempoolsAdapter | None:
    """Return None while these pools contain nothing that the adapter would count."""
    global _search_at
    now = time.monotonic()
    if now < _search_at:
        return None
    _search_at = now + SEARCH_SECONDS
    with cuda.capture_safe():
        return MempoolsAdapter() if next(_pools(), None) else None


def counted_by(ordinal: int, live_bytes: int) -> str | None:
    """Return the allocator that counts the device's default pool, if the pool can contain ``live_bytes``.

    A library may have created a pool of its own: the default pool then holds less.
    """
    pool = cuda.default_pool(ordinal)
    amounts = None if pool is None else cuda.pool_bytes(pool)
    if amounts is None or amounts[0] < max(1, live_bytes):
        return None
    return "torch" if _is_counted_by_torch(ordinal) else "mempool"


def is_counted(ordinal: int, pool: int) -> bool:
    """Return whether one allocator counts this pool for all libraries: a device's default one, or one of cuda.core."""
    return pool == cuda.default_pool(ordinal) or _is_of_cuda_core(pool)


def counter_of(ordinal: int, pool: int) -> str | None:
    """Return the allocator that counts such a pool."""
    return "cuda.core" if _is_of_cuda_core(pool) else counted_by(ordinal, 0)


def _is_of_cuda_core(pool: int) -> bool:
    module = sys.modules.get("gpumond.agent.allocators.cuda_core")
    return module is not None and module.owns(pool)


def _pools() -> Iterator[tuple[int, int, int, int]]:
    """Yield ordinal, handle, reserved and used bytes of each pool that no other adapter counts."""
    for ordinal in cuda.contexts():
        pool = cuda.default_pool(ordinal)
        amounts = None if pool is None else cuda.pool_bytes(pool)
        if pool is not None and amounts and amounts[0] and not _is_counted_by_torch(ordinal):
            yield ordinal, pool, *amounts


def _is_counted_by_torch(ordinal: int) -> bool:
    torch = sys.modules.get("gpumond.agent.allocators.torch")
    return torch is not None and torch.counts_default_pool(ordinal)


NOT_RELEASABLE = Reclaimable(0, 0, 0, "not_releasable")


def cached(allocator: str, uuid: str, live: int, held: int) -> PoolUsage:
    """Return a pool whose library does not report which of its free bytes a flush returns."""
    free = max(0, held - live)
    return PoolUsage(
        allocator=allocator,
        device_uuid=uuid,
        live_bytes=live,
        held_bytes=live + free,
        reclaimable=Reclaimable(0, free, free, "interval"),
        stranded_bytes=0,
    )


def arena(
    allocator: str, uuid: str, live: int, held: int | None, peak: int | None = None, inside: str | None = None
) -> PoolUsage:
    """Return the pool of a library that keeps all memory until the process ends.

    ``held`` is None where the library does not report it.
    """
    known = held is not None and held >= live
    most = held if held is not None and known else live
    return PoolUsage(
        allocator=allocator,
        device_uuid=uuid,
        live_bytes=live,
        held_bytes=most,
        reclaimable=NOT_RELEASABLE,
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
