"""The driver's default memory pools, one a device: what every ``cudaMallocAsync`` of the process shares.

PyTorch's statistics of its cudaMallocAsync backend are those of this pool, so that it counts where that backend is
in use, and this adapter elsewhere. What other libraries take from it (CuPy's MemoryAsyncPool, TensorFlow, RMM's view
of it) they report as ``inside`` whoever counts it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence

from gpumond.agent import cuda
from gpumond.agent.adapters import FlushRefused
from gpumond.agent.adapters.python_owners import left_by_trim
from gpumond.model.pools import PoolUsage, Reclaimable, StepResult

LOOK_SECONDS = 0.05
"""So long a look that found nothing holds: one report asks for the adapters several times."""

_look_at = 0.0


class MempoolsAdapter:
    name = "mempool"

    def framework(self) -> str:
        return f"cuda {cuda.version()}"

    def read(self, exact: bool = False) -> Sequence[PoolUsage]:
        return tuple(_usage(*pool) for pool in _pools())

    def left(self) -> Mapping[str, int]:
        return left_by_trim((ordinal, used) for ordinal, _, _, used in _pools())

    def flush(self, steps: Sequence[str]) -> Sequence[StepResult]:
        """Waits until each device is idle, then trims its pool: what is freed but pending would stay."""
        if not cuda.contexts():
            raise FlushRefused("no device has a live CUDA context")
        if cuda.CAPTURING:
            raise FlushRefused("a CUDA graph is being captured")
        if "trim" not in steps:
            return ()
        started, released = time.perf_counter(), 0
        for ordinal, pool, reserved, _ in list(_pools()):
            if cuda.trim(ordinal, pool) and (after := cuda.pool_bytes(pool)):
                released += max(0, reserved - after[0])
        return (StepResult("trim", released, time.perf_counter() - started),)


def adapter() -> MempoolsAdapter | None:
    """None as long as there is nothing in these pools that it would count."""
    global _look_at
    now = time.monotonic()
    if now < _look_at:
        return None
    _look_at = now + LOOK_SECONDS
    with cuda.beside_captures():
        return MempoolsAdapter() if next(_pools(), None) else None


def counted_by(ordinal: int, live_bytes: int) -> str | None:
    """The allocator that counts the device's default pool, if so many bytes can be in it.

    A library may also have made a pool of its own: the default one then does not hold as much.
    """
    pool = cuda.default_pool(ordinal)
    amounts = None if pool is None else cuda.pool_bytes(pool)
    if amounts is None or amounts[0] < max(1, live_bytes):
        return None
    return "torch" if _is_torchs(ordinal) else "mempool"


def _pools() -> Iterator[tuple[int, int, int, int]]:
    """Ordinal, handle, reserved and used bytes of each pool that no other adapter counts."""
    for ordinal in cuda.contexts():
        pool = cuda.default_pool(ordinal)
        amounts = None if pool is None else cuda.pool_bytes(pool)
        if pool is not None and amounts and amounts[0] and not _is_torchs(ordinal):
            yield ordinal, pool, *amounts


def _usage(ordinal: int, pool: int, reserved: int, used: int) -> PoolUsage:
    free = max(0, reserved - used)
    uuid = cuda.device_uuid(ordinal) or ""
    return PoolUsage("mempool", uuid, used, used + free, Reclaimable(0, free, free, "interval"), 0)


def _is_torchs(ordinal: int) -> bool:
    torch = sys.modules.get("gpumond.agent.adapters.torch")
    return torch is not None and torch.counts_default_pool(ordinal)
