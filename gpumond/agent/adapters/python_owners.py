"""Where the program's blocks lie in a stream-ordered pool, as their owners in Python tell: neither the driver nor a
library lists them.

One pass of the garbage collector's list, only for a plan or a flush. The list itself, and what it refers to, is let go
of before another thread runs: else the program's objects would end in this thread. Owners are held a moment longer.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from itertools import compress
from typing import Any

from gpumond.agent import cuda
from gpumond.agent.adapters.trim_model import Blocks, left_free_bytes

MAX_ALLOCATIONS = 2_000_000
"""Of Python. There is a tracked object for each three or four of them; with more the pass stalls Python for more than
some 100 ms, about as long as a ``gc.collect()`` would."""

MAX_OWNERS = 20_000


def left_by_trim(pools: Iterable[tuple[int, int]]) -> dict[str, int]:
    """By device the free bytes that a trim leaves, of a pool with this ordinal and so many bytes in use.

    Nothing where it cannot be told, nor in a process on several devices: an owner that ends meanwhile would be freed
    in the context of another one.
    """
    left: dict[str, int] = {}
    if cuda.CAPTURING or len(cuda.contexts()) > 1 or sys.getallocatedblocks() > MAX_ALLOCATIONS:
        return left
    for ordinal, used in pools:
        with cuda.current(ordinal) as ready:
            try:
                free = left_free_bytes(used, _kinds()) if ready else None
            except Exception:  # another version's objects, or some that change under our hands
                free = None
        uuid = cuda.device_uuid(ordinal)
        if free is not None and uuid is not None:
            left[uuid] = free
    return left


def _kinds() -> list[Blocks]:
    """The blocks of each library's owners."""
    types = [[getattr(sys.modules.get(module), name, None) for module, name in names] for names, _ in OWNERS]
    owners = _instances({id(one) for each in types for one in each if one is not None})
    if len(owners) > MAX_OWNERS:
        return []
    return [
        dict(block for owner in owners if type(owner) in each for block in blocks(owner))
        for each, (_, blocks) in zip(types, OWNERS, strict=True)
    ]


def _instances(types: set[int]) -> list[Any]:
    """All in C, as a type may have any ``__hash__``, and as each bytecode may be followed by another thread's."""
    tracked = gc.get_objects()
    found = list(compress(tracked, map(types.__contains__, map(id, map(type, tracked)))))
    del tracked
    return found


def _of_tensor(tensor: Any) -> Iterator[tuple[int, int]]:
    """Not its gradient, unless that has an owner of its own: the backward pass exchanges it without the GIL."""
    disabled = getattr(sys.modules["torch"]._C, "DisableTorchFunction", nullcontext)
    with disabled():  # such as `with torch.device(…)` puts in force
        if tensor.is_cuda:
            storage = tensor.untyped_storage()
            yield storage.data_ptr(), storage.nbytes()


def _of_pointer(pointer: Any) -> Iterator[tuple[int, int]]:
    """Into CuPy's own stream-ordered memory; what is of another make is owned by that."""
    if type(pointer.mem).__name__ == "MemoryAsync":
        yield pointer.mem.ptr, pointer.mem.size


def _of_buffer(buffer: Any) -> Iterator[tuple[int, int]]:
    yield buffer.ptr, buffer.capacity()


OWNERS: tuple[tuple[tuple[tuple[str, str], ...], Callable[[Any], Iterator[tuple[int, int]]]], ...] = (
    ((("torch", "Tensor"), ("torch.nn.parameter", "Parameter")), _of_tensor),
    ((("cupy.cuda.memory", "MemoryPointer"),), _of_pointer),
    ((("rmm", "DeviceBuffer"),), _of_buffer),
)
"""Types, by module and name, and what their instances tell."""
