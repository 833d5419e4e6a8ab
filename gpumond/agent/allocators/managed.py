"""Managed memory (``cudaMallocManaged``) of CuPy and Numba, by the device that it was allocated for.

Its pages are on the device or on the host. RMM's adapter reports that of RMM. Managed memory that CuPy allocates
without a pool (``set_allocator(malloc_managed)``), or that the program allocates by itself, is not counted by anyone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from gpumond.agent.allocators import cuda
from gpumond.agent.allocators.mempools import GuardedAdapter
from gpumond.facts.pools import PoolUsage, Reclaimable


class ManagedAdapter(GuardedAdapter):
    name = "managed"

    def framework(self) -> str:
        return f"cuda {cuda.version()}"

    def read(self, exact: bool = False) -> Sequence[PoolUsage]:
        amounts: dict[int, tuple[int, int]] = {}
        for ordinal, live, free in _amounts():
            before = amounts.get(ordinal, (0, 0))
            amounts[ordinal] = before[0] + live, before[1] + free
        pools = (_usage(ordinal, live, free) for ordinal, (live, free) in amounts.items())
        return tuple(pool for pool in pools if pool is not None)

    @property
    def flush_step(self) -> str:  # type: ignore[override]
        return "cache" if "cupy" in sys.modules else ""

    def release(self) -> tuple[int, str]:
        """Free the whole chunks of CuPy's pool."""
        from gpumond.agent.allocators.cupy import managed_pool, visit_devices

        cupy, free = sys.modules["cupy"], _free_bytes()
        pool = managed_pool(cupy)
        if pool is not None:
            visit_devices(cupy, cuda.devices_with_context(), lambda ordinal: pool.free_all_blocks())
        return free - _free_bytes(), ""


def adapter() -> ManagedAdapter | None:
    """Return None while neither library has managed memory."""
    with cuda.relaxed_capture_mode():
        return ManagedAdapter() if next(_amounts(), None) else None


def _amounts() -> Iterator[tuple[int, int, int]]:
    """Yield the device, the bytes in use and the free bytes of each library's managed memory."""
    cupy, numba = sys.modules.get("cupy"), sys.modules.get("gpumond.agent.allocators.numba")
    if cupy is not None and "gpumond.agent.allocators.cupy" in sys.modules:
        from gpumond.agent.allocators.cupy import managed_pool, visit_devices

        pool = managed_pool(cupy)
        if pool is not None:
            amounts = visit_devices(
                cupy,
                cuda.devices_with_context(),
                lambda ordinal: (ordinal, int(pool.used_bytes()), int(pool.total_bytes())),
            )
            yield from ((ordinal, used, max(0, total - used)) for ordinal, used, total in amounts if total)
    if numba is not None:
        yield from ((ordinal, size, 0) for ordinal, size in numba.managed_bytes() if size)


def _free_bytes() -> int:
    return sum(free for _, _, free in _amounts())


def _usage(ordinal: int, live_bytes: int, free_bytes: int) -> PoolUsage | None:
    uuid = cuda.device_uuid(ordinal)
    if uuid is None:
        return None
    return PoolUsage(
        allocator="managed",
        device_uuid=uuid,
        live_bytes=live_bytes,
        held_bytes=live_bytes + free_bytes,
        reclaimable=Reclaimable(
            0 if live_bytes else free_bytes,
            free_bytes,
            free_bytes,
            "interval" if live_bytes and free_bytes else "exact",
        ),
        stranded_bytes=0,
        managed=True,
    )
