"""The driver's default memory pools, one for each device, which every ``cudaMallocAsync`` of the process shares.

The statistics of PyTorch's cudaMallocAsync backend are those of this pool, so PyTorch counts it where that backend
is in use, and this adapter elsewhere. Other libraries report what they take from it (CuPy's MemoryAsyncPool,
TensorFlow, RMM's view) as ``inside`` the allocator that counts it, which `allocator_counting_default_pool` names;
`kept_pool` builds the pool of a library that returns nothing by itself.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import combinations, compress
from typing import Any

from gpumond.agent.allocators import cuda
from gpumond.agent.allocators.adapters import AllocatorAdapter, FlushRefused
from gpumond.agent.allocators.gil import tensors_unchanged
from gpumond.facts.pools import PoolUsage, Reclaimable, StepResult


class GuardedAdapter(AllocatorAdapter):
    """Refuses a flush while no device has a context, and while a graph is captured."""

    def check(self) -> None:
        if reason := cuda.why_not_flushable():
            raise FlushRefused(reason)


class MempoolsAdapter(GuardedAdapter):
    name = "mempool"
    flush_step = "trim"

    def framework(self) -> str:
        return f"cuda {cuda.version()}"

    def read(self, exact: bool = False) -> Sequence[PoolUsage]:
        return tuple(
            caching_pool("mempool", cuda.device_uuid(ordinal) or "", used, reserved)
            for ordinal, _, reserved, used in _pools()
        )

    def bytes_left_by_flush(self) -> Mapping[str, int]:
        return bytes_left_by_trim((ordinal, used) for ordinal, _, _, used in _pools())

    def release(self) -> tuple[int, str]:
        return trim_pools((ordinal, pool) for ordinal, pool, _, _ in _pools())[0], ""


def adapter() -> MempoolsAdapter | None:
    """Return None while these pools contain nothing that the adapter would count."""
    with cuda.relaxed_capture_mode():
        return MempoolsAdapter() if next(_pools(), None) else None


def allocator_counting_default_pool(ordinal: int, live_bytes: int) -> str | None:
    """Return the allocator that counts the device's default pool, if the pool can contain ``live_bytes``.

    A library may have created a pool of its own: the default pool then holds less.
    """
    pool = cuda.default_pool(ordinal)
    pool_bytes = None if pool is None else cuda.mempool_bytes(pool)
    if pool_bytes is None or pool_bytes.reserved < max(1, live_bytes):
        return None
    return "torch" if _is_counted_by_torch(ordinal) else "mempool"


def has_counting_allocator(ordinal: int, pool: int) -> bool:
    """Return whether one allocator counts this pool for all libraries: a device's default one, or one of cuda.core."""
    return pool == cuda.default_pool(ordinal) or _belongs_to_cuda_core(pool)


def allocator_counting_pool(ordinal: int, pool: int) -> str | None:
    """Return the allocator that counts such a pool."""
    return "cuda.core" if _belongs_to_cuda_core(pool) else allocator_counting_default_pool(ordinal, 0)


def _belongs_to_cuda_core(pool: int) -> bool:
    module = sys.modules.get("gpumond.agent.allocators.cuda_core")
    return module is not None and module.owns(pool)


def _pools() -> Iterator[tuple[int, int, int, int]]:
    """Yield ordinal, handle, reserved and used bytes of each pool that no other adapter counts."""
    for ordinal in cuda.devices_with_context():
        pool = cuda.default_pool(ordinal)
        pool_bytes = None if pool is None else cuda.mempool_bytes(pool)
        if pool is not None and pool_bytes and pool_bytes.reserved and not _is_counted_by_torch(ordinal):
            yield ordinal, pool, *pool_bytes


def _is_counted_by_torch(ordinal: int) -> bool:
    torch = sys.modules.get("gpumond.agent.allocators.torch")
    return torch is not None and torch.counts_default_pool(ordinal)


def trim_pools(pools: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Trim pools, each given by ordinal and handle, when their device is idle: freed but pending bytes would stay.

    Return the released bytes, and the number of pools.
    """
    released = trimmed = 0
    for ordinal, pool in list(pools):
        before = cuda.mempool_bytes(pool)
        if before and cuda.trim_mempool(ordinal, pool):
            after = cuda.mempool_bytes(pool)
            released, trimmed = released + (max(0, before.reserved - after.reserved) if after else 0), trimmed + 1
    return released, trimmed


NOT_RELEASABLE = Reclaimable(0, 0, 0, "not_releasable")


def caching_pool(allocator: str, uuid: str, live_bytes: int, held_bytes: int) -> PoolUsage:
    """Return a pool whose library does not report which of its free bytes a flush returns."""
    free_bytes = max(0, held_bytes - live_bytes)
    return PoolUsage(
        allocator=allocator,
        device_uuid=uuid,
        live_bytes=live_bytes,
        held_bytes=live_bytes + free_bytes,
        reclaimable=Reclaimable(0, free_bytes, free_bytes, "interval"),
        stranded_bytes=0,
    )


def kept_pool(
    allocator: str,
    uuid: str,
    live_bytes: int,
    held_bytes: int | None,
    peak_bytes: int | None = None,
    inside: str | None = None,
) -> PoolUsage:
    """Return the pool of a library that keeps all memory until the process ends.

    ``held_bytes`` is None where the library does not report it.
    """
    is_held_known = held_bytes is not None and held_bytes >= live_bytes
    if held_bytes is None or not is_held_known:
        held_bytes = live_bytes
    return PoolUsage(
        allocator=allocator,
        device_uuid=uuid,
        live_bytes=live_bytes,
        held_bytes=held_bytes,
        reclaimable=NOT_RELEASABLE,
        stranded_bytes=held_bytes - live_bytes,
        inside=inside,
        peak_live_bytes=peak_bytes,
        held_known=is_held_known,
    )


class KeepingAdapter(AllocatorAdapter):
    """A library that keeps all memory: a flush returns no bytes, and the reason."""

    def flush(self, steps: Sequence[str]) -> Sequence[StepResult]:
        pools, step = self.read(), next((step for step in ("cache", "trim") if step in steps), None)
        if step is None or not pools:
            return ()
        counting_allocator = next((pool.inside for pool in pools if pool.inside), None)
        if counting_allocator:
            reason = f"{counting_allocator} counts and releases its memory"
        else:
            reason = f"{self.name} keeps its memory until the program exits"
        return (StepResult(step, 0, 0.0, reason),)


MAX_ALLOCATIONS = 2_000_000
"""Largest number of memory blocks that Python has allocated. One in three or four is a tracked object; with more, the
pass stalls Python for more than about 100 ms, as long as a ``gc.collect()`` would.
"""

MAX_HOLDERS = 20_000


def bytes_left_by_trim(pools: Iterable[tuple[int, int]]) -> dict[str, int]:
    """Return by device the free bytes that a trim leaves in pools, each given by ordinal and bytes in use.

    A trim leaves the granules that contain a block of the program. Neither the driver nor a library lists these blocks:
    the Python objects that hold them do, which one pass over the garbage collector's list finds, only for a plan or a
    flush. The list and what it refers to are released before another thread runs: otherwise the program's objects would
    be finalized in this thread. References to these objects last a little longer.

    Leaves out the devices for which they are unknown. Empty in a process on several devices: one that ends in the
    meantime would be freed in the context of another device.
    """
    bytes_left: dict[str, int] = {}
    if cuda.is_capturing() or len(cuda.devices_with_context()) > 1 or sys.getallocatedblocks() > MAX_ALLOCATIONS:
        return bytes_left
    for ordinal, used in pools:
        with cuda.current_context(ordinal) as ready:
            try:
                free = free_bytes_left_by_trim(used, _blocks_by_holder_type()) if ready else None
            except Exception:  # objects of another version, or a concurrent change
                free = None
        uuid = cuda.device_uuid(ordinal)
        if free is not None and uuid is not None:
            bytes_left[uuid] = free
    return bytes_left


def _blocks_by_holder_type() -> list[Blocks]:
    """Return the blocks that each library's objects hold. Raises TensorsBusy."""
    types_by_library = [
        [getattr(sys.modules.get(module), name, None) for module, name in names] for names, _ in BLOCK_HOLDERS
    ]
    with tensors_unchanged():
        holders = find_instances({id(cls) for types in types_by_library for cls in types if cls is not None})
        if len(holders) > MAX_HOLDERS:
            return []
        return [
            dict(block for holder in holders if type(holder) in types for block in read_blocks(holder))
            for types, (_, read_blocks) in zip(types_by_library, BLOCK_HOLDERS, strict=True)
        ]


def find_instances(type_ids: set[int]) -> list[Any]:
    """Find objects in C alone: a type may have any ``__hash__``. The caller holds the GIL."""
    tracked = gc.get_objects()
    return list(compress(tracked, map(type_ids.__contains__, map(id, map(type, tracked)))))


def _tensor_blocks(tensor: Any) -> Iterator[tuple[int, int]]:
    """Yield the storage, without the gradient unless that has its own holder: backward exchanges it without the GIL."""
    disabled = getattr(sys.modules["torch"]._C, "DisableTorchFunction", nullcontext)
    with disabled():  # a mode such as `with torch.device(…)` may be active
        if tensor.is_cuda:
            storage = tensor.untyped_storage()
            yield storage.data_ptr(), storage.nbytes()


def _cupy_blocks(pointer: Any) -> Iterator[tuple[int, int]]:
    """Yield blocks of CuPy's own stream-ordered memory; other memory has other holders."""
    if type(pointer.mem).__name__ == "MemoryAsync":
        yield pointer.mem.ptr, pointer.mem.size


def _rmm_blocks(buffer: Any) -> Iterator[tuple[int, int]]:
    yield buffer.ptr, buffer.capacity()


BLOCK_HOLDERS: tuple[tuple[tuple[tuple[str, str], ...], Callable[[Any], Iterator[tuple[int, int]]]], ...] = (
    ((("torch", "Tensor"), ("torch.nn.parameter", "Parameter")), _tensor_blocks),
    ((("cupy.cuda.memory", "MemoryPointer"),), _cupy_blocks),
    ((("rmm", "DeviceBuffer"),), _rmm_blocks),
)
"""Types, by module and name, and the function that yields the blocks of an instance."""


GRANULE_BYTES = 32 << 20
"""The driver takes memory for such a pool in granules of 32 MiB and returns the empty ones.

This is not documented; it was observed in each of 120 random histories (``python -m bench.gpu_histories``). They also
showed that the driver counts exactly the requested bytes as used.
"""

Blocks = Mapping[int, int]
"""Sizes in bytes by address."""


def free_bytes_left_by_trim(used_bytes: int, alternatives: Sequence[Blocks]) -> int | None:
    """Return the free bytes that stay. ``alternatives``: the blocks by type of holder, any of which may use the pool.

    None unless a combination adds up to the pool's used bytes: otherwise some blocks are unknown.
    """
    for blocks in _combinations_of_blocks(alternatives):
        if sum(blocks.values()) == used_bytes:
            return GRANULE_BYTES * len(set(_touched_granules(blocks))) - used_bytes
    return None


def _combinations_of_blocks(alternatives: Sequence[Blocks]) -> Iterator[Blocks]:
    for count in range(len(alternatives) + 1):
        for selected in combinations(alternatives, count):
            yield {address: size for blocks in selected for address, size in blocks.items()}


def _touched_granules(blocks: Blocks) -> Iterable[int]:
    for address, size in blocks.items():
        yield from range(address // GRANULE_BYTES, -(-(address + size) // GRANULE_BYTES))
