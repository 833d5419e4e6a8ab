"""Addresses of the program's blocks in a stream-ordered pool, from the Python objects that own them: neither the driver
nor a library lists them. A trim leaves the granules that contain such a block.

One pass over the garbage collector's list, only for a plan or a flush. The list and what it refers to are released
before another thread runs: otherwise the program's objects would be finalized in this thread. References to owners last
a little longer.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import combinations, compress
from typing import Any

from gpumond.agent import cuda

MAX_ALLOCATIONS = 2_000_000
"""Largest number of memory blocks that Python has allocated. One in three or four is a tracked object; with more, the
pass stalls Python for more than about 100 ms, as long as a ``gc.collect()`` would.
"""

MAX_OWNERS = 20_000


def retained_by_trim(pools: Iterable[tuple[int, int]]) -> dict[str, int]:
    """Return by device the free bytes that a trim leaves in pools, each given by ordinal and bytes in use.

    Leaves out the devices for which they are unknown. Empty in a process on several devices: an owner that ends in the
    meantime would be freed in the context of another device.
    """
    retained: dict[str, int] = {}
    if cuda.capturing() or len(cuda.contexts()) > 1 or sys.getallocatedblocks() > MAX_ALLOCATIONS:
        return retained
    for ordinal, used in pools:
        with cuda.current(ordinal) as ready:
            try:
                free = retained_free_bytes(used, _kinds()) if ready else None
            except Exception:  # objects of another version, or a concurrent change
                free = None
        uuid = cuda.device_uuid(ordinal)
        if free is not None and uuid is not None:
            retained[uuid] = free
    return retained


def _kinds() -> list[Blocks]:
    """Return the blocks of each library's owners."""
    types = [[getattr(sys.modules.get(module), name, None) for module, name in names] for names, _ in OWNERS]
    owners = instances({id(one) for each in types for one in each if one is not None})
    if len(owners) > MAX_OWNERS:
        return []
    return [
        dict(block for owner in owners if type(owner) in each for block in blocks(owner))
        for each, (_, blocks) in zip(types, OWNERS, strict=True)
    ]


def instances(types: set[int]) -> list[Any]:
    """Find objects in C alone: a type may have any ``__hash__``, and another thread may run after each bytecode."""
    tracked = gc.get_objects()
    found = list(compress(tracked, map(types.__contains__, map(id, map(type, tracked)))))
    del tracked
    return found


def _of_tensor(tensor: Any) -> Iterator[tuple[int, int]]:
    """Yield the storage, without the gradient unless that has its own owner: backward exchanges it without the GIL."""
    disabled = getattr(sys.modules["torch"]._C, "DisableTorchFunction", nullcontext)
    with disabled():  # a mode such as `with torch.device(…)` may be active
        if tensor.is_cuda:
            storage = tensor.untyped_storage()
            yield storage.data_ptr(), storage.nbytes()


def _of_pointer(pointer: Any) -> Iterator[tuple[int, int]]:
    """Yield blocks of CuPy's own stream-ordered memory; other memory has other owners."""
    if type(pointer.mem).__name__ == "MemoryAsync":
        yield pointer.mem.ptr, pointer.mem.size


def _of_buffer(buffer: Any) -> Iterator[tuple[int, int]]:
    yield buffer.ptr, buffer.capacity()


OWNERS: tuple[tuple[tuple[tuple[str, str], ...], Callable[[Any], Iterator[tuple[int, int]]]], ...] = (
    ((("torch", "Tensor"), ("torch.nn.parameter", "Parameter")), _of_tensor),
    ((("cupy.cuda.memory", "MemoryPointer"),), _of_pointer),
    ((("rmm", "DeviceBuffer"),), _of_buffer),
)
"""Types, by module and name, and the function that yields the blocks of an instance."""


GRANULE = 32 << 20
"""The driver takes memory for such a pool in granules of 32 MiB and returns the empty ones.

This is not documented; it was observed in each of 120 random histories (``python -m bench.gpu_histories``). They also
showed that the driver counts exactly the requested bytes as used.
"""

Blocks = Mapping[int, int]
"""Sizes in bytes by address."""


def retained_free_bytes(used: int, kinds: Sequence[Blocks]) -> int | None:
    """Return the free bytes that stay. ``kinds``: the blocks of each kind of owner; any combination may use the pool.

    None unless a combination adds up to the pool's used bytes: otherwise some blocks are unknown.
    """
    for blocks in _combined(kinds):
        if sum(blocks.values()) == used:
            return GRANULE * len(set(_touched(blocks))) - used
    return None


def _combined(kinds: Sequence[Blocks]) -> Iterator[Blocks]:
    for count in range(len(kinds) + 1):
        for selected in combinations(kinds, count):
            yield {address: size for blocks in selected for address, size in blocks.items()}


def _touched(blocks: Blocks) -> Iterable[int]:
    for address, size in blocks.items():
        yield from range(address // GRANULE, -(-(address + size) // GRANULE))
