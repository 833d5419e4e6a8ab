"""A caching allocator modeled on PyTorch's, on a simulated device.

Segments come from the device and are cut into blocks; a freed block merges with its free neighbors and stays in the
cache. Whole free segments can be returned to the device. Free bytes of a segment that also contains a live block
cannot: they are stranded. The rules are those of PyTorch's native allocator without expandable segments, one stream
(c10/cuda/CUDACachingAllocator.cpp).
"""

from __future__ import annotations

import os
import sys
import threading
from bisect import bisect_left, insort
from collections.abc import Mapping
from typing import Any
from weakref import WeakSet, WeakValueDictionary

from gpumond.facts.pools import PoolUsage, Reclaimable
from gpumond.facts.units import MIB
from gpumond.sim.device import Context, OutOfMemory, SimDevice

ROUNDING_BYTES = 512
MAX_SMALL_BYTES = MIB
"""Largest block of the small pool. A large block is cut only if more than this remains."""
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
MIN_HUGE_BYTES = 10 * MIB
"""Smallest request that gets a segment of its own, rounded up to ``HUGE_ROUNDING_BYTES``."""
HUGE_ROUNDING_BYTES = 2 * MIB
MAX_CALLS = 16
"""Calls of a recorded stack."""


class _Block:
    """A piece of a segment; its neighbors in the segment are linked. A segment is its first block."""

    __slots__ = ("address", "free", "is_small", "next", "previous", "size")

    def __init__(self, address: int, size: int, is_small: bool) -> None:
        self.address = address
        self.size = size
        self.is_small = is_small
        self.free = False
        self.previous: _Block | None = None
        self.next: _Block | None = None

    @property
    def is_segment(self) -> bool:
        """True if the block is its whole segment: it has no neighbors."""
        return self.previous is None and self.next is None


class CachingAllocator:
    """The allocator of this process on one device. It attaches with its first allocation, not before.

    ``lock`` may be held by callers, so several calls read and change one state. Above ``limit_bytes`` held bytes
    the allocator behaves as if the device were full.
    """

    def __init__(self, device: SimDevice) -> None:
        """Raises ValueError if the process already has an allocator on that device."""
        spec = device.spec()
        self.device_uuid, self.device_index = spec.uuid, spec.index
        self.limit_bytes: int | None = None
        self._device = device
        self._clear()
        if _allocators.setdefault(self.device_uuid, self) is not self:
            raise ValueError(f"this process already has an allocator on {self.device_uuid}")

    def _clear(self) -> None:
        self.lock = threading.RLock()
        self._context: Context | None = None
        self._live: dict[int, _Block] = {}
        self.tensors: WeakSet[Tensor] = WeakSet()
        self._live_bytes_by_kind: dict[str, int] = {}
        self._kinds: dict[int, str] = {}
        self._stacks: dict[int, list[dict[str, Any]]] | None = None  # of live blocks, while they are recorded
        self._cached: dict[bool, list[tuple[int, int, _Block]]] = {True: [], False: []}  # per pool, by size
        self._next_address = LARGE_SEGMENT_BYTES
        self._live_bytes = self._held_bytes = self._peak_live_bytes = self._peak_held_bytes = 0
        self._retries = self._ooms = self._device_allocations = self._device_frees = 0

    @property
    def is_attached(self) -> bool:
        return self._context is not None

    def wait(self) -> None:
        """Return when the process is not suspended."""
        if self._context is not None:
            self._context.wait()

    def malloc(self, size_bytes: int, kind: str = "activations") -> int:
        """Return the address of a block of at least that size. ``kind``: what it holds. Raises OutOfMemory."""
        if size_bytes < 0:
            raise ValueError(f"size_bytes must be at least 0, got {size_bytes}")
        size = _round_up(max(size_bytes, 1), ROUNDING_BYTES)
        with self.lock:
            block = self._best_fit(size) or self._new_segment(size)
            block.free = False
            self._cut(block, size)
            self._live[block.address] = block
            self._live_bytes_by_kind[kind] = self._live_bytes_by_kind.get(kind, 0) + block.size
            self._kinds[block.address] = kind
            if self._stacks is not None:
                self._stacks[block.address] = _calls()
            self._live_bytes += block.size
            self._peak_live_bytes = max(self._peak_live_bytes, self._live_bytes)
            return block.address

    def free(self, address: int) -> None:
        """Put a block into the cache. Raises KeyError if no live block has that address."""
        with self.lock:
            block = self._live.pop(address)
            self._live_bytes_by_kind[self._kinds.pop(address)] -= block.size
            if self._stacks is not None:
                self._stacks.pop(address, None)
            self._live_bytes -= block.size
            before, after = block.previous, block.next
            if after is not None and after.free:
                self._take(after)
                _merge(block, after)
            if before is not None and before.free:
                self._take(before)
                _merge(before, block)
                block = before
            self._put(block)

    def empty_cache(self) -> int:
        """Return every whole free segment to the device. Returns the number of bytes."""
        with self.lock:
            released = 0
            for is_small, blocks in self._cached.items():
                segments = [block.size for _, _, block in blocks if block.is_segment]
                released += sum(segments)
                self._device_frees += len(segments)
                self._cached[is_small] = [entry for entry in blocks if not entry[2].is_segment]
            if self._context is not None and released:
                self._context.free(released)
                self._held_bytes -= released
            return released

    def close(self) -> None:
        """Return all memory, live blocks and context included, and detach from the device."""
        with self.lock:
            _allocators.pop(self.device_uuid, None)
            if self._context is not None:
                self._context.close()
            self._clear()

    @property
    def live_bytes(self) -> int:
        return self._live_bytes

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    def live_by_kind(self) -> Mapping[str, int]:
        """Return the live bytes by what they hold."""
        with self.lock:
            return dict(self._live_bytes_by_kind)

    def set_recording(self, enabled: bool) -> None:
        """Record the calls that allocate a block, or forget them."""
        with self.lock:
            self._stacks = {} if enabled else None

    def live_blocks(self) -> list[dict[str, Any]]:
        """Return the live blocks with their recorded calls, innermost first, as PyTorch's memory snapshot does."""
        with self.lock:
            stacks = self._stacks or {}
            return [
                {"state": "active_allocated", "size": block.size, "frames": stacks.get(address, [])}
                for address, block in self._live.items()
            ]

    def usage(self) -> PoolUsage:
        """Return the state as an agent reports it: held = live + reclaimable + stranded, exactly."""
        with self.lock:
            blocks = (block for pool in self._cached.values() for _, _, block in pool)
            reclaimable = sum(block.size for block in blocks if block.is_segment)
            return PoolUsage(
                allocator="sim",
                device_uuid=self.device_uuid,
                live_bytes=self._live_bytes,
                held_bytes=self._held_bytes,
                reclaimable=Reclaimable(reclaimable, reclaimable, reclaimable),
                stranded_bytes=self._held_bytes - self._live_bytes - reclaimable,
                peak_live_bytes=self._peak_live_bytes,
                peak_held_bytes=self._peak_held_bytes,
                ooms=self._ooms,
                retries=self._retries,
                device_allocations=self._device_allocations,
                device_frees=self._device_frees,
                live_allocations=len(self._live),
            )

    def blocks(self) -> list[tuple[int, int, bool]]:
        """Return address, size and whether it is free for every block, in order of addresses."""
        with self.lock:
            cached = [block for pool in self._cached.values() for _, _, block in pool]
            return sorted((block.address, block.size, block.free) for block in [*self._live.values(), *cached])

    def _best_fit(self, size: int) -> _Block | None:
        pool = self._cached[size <= MAX_SMALL_BYTES]
        position = bisect_left(pool, (size,))
        return pool.pop(position)[2] if position < len(pool) else None

    def _new_segment(self, size: int) -> _Block:
        segment = _segment_bytes(size)
        if self._context is None:
            self._context = self._device.attach()
        try:
            self._allocate(self._context, segment)
        except OutOfMemory:
            self._retries += 1
            self.empty_cache()
            try:
                self._allocate(self._context, segment)
            except OutOfMemory:
                self._ooms += 1
                raise
        self._device_allocations += 1
        self._held_bytes += segment
        self._peak_held_bytes = max(self._peak_held_bytes, self._held_bytes)
        block = _Block(self._next_address, segment, size <= MAX_SMALL_BYTES)
        self._next_address += segment
        return block

    def _allocate(self, context: Context, segment: int) -> None:
        if self.limit_bytes is not None and self._held_bytes + segment > self.limit_bytes:
            raise OutOfMemory(
                f"tried to allocate {segment / MIB:.2f} MiB: {self._held_bytes / MIB:.2f} MiB held, and the limit "
                f"is {self.limit_bytes / MIB:.2f} MiB"
            )
        context.allocate(segment)

    def _cut(self, block: _Block, size: int) -> None:
        remaining = block.size - size
        if remaining < ROUNDING_BYTES if block.is_small else remaining <= MAX_SMALL_BYTES:
            return
        remainder = _Block(block.address + size, remaining, block.is_small)
        remainder.previous, remainder.next = block, block.next
        if block.next is not None:
            block.next.previous = remainder
        block.next = remainder
        block.size = size
        self._put(remainder)

    def _put(self, block: _Block) -> None:
        block.free = True
        insort(self._cached[block.is_small], (block.size, block.address, block))

    def _take(self, block: _Block) -> None:
        pool = self._cached[block.is_small]
        del pool[bisect_left(pool, (block.size, block.address))]


class Tensor:
    """A live block as the program that allocated it refers to it."""

    __slots__ = ("__weakref__", "address", "size_bytes")

    def __init__(self, address: int, size_bytes: int) -> None:
        self.address, self.size_bytes = address, size_bytes


class ProgramMemory:
    """A program's blocks on its device."""

    def __init__(self, device: SimDevice) -> None:
        self.allocator = CachingAllocator(device)
        self._device = device
        self._size_bytes = device.spec().size_bytes
        self._live: set[int] = set()

    def allocate(self, share: float, kind: str = "activations") -> Tensor:
        """Allocate a block of that share of the device. ``kind``: what it holds. Raises OutOfMemory."""
        size = max(int(share * self._size_bytes) // HUGE_ROUNDING_BYTES * HUGE_ROUNDING_BYTES, HUGE_ROUNDING_BYTES)
        tensor = Tensor(self.allocator.malloc(size, kind), size)
        self._live.add(tensor.address)
        with self.allocator.lock:
            self.allocator.tensors.add(tensor)
        return tensor

    def free(self, *tensors: Tensor) -> None:
        self._free(*(tensor.address for tensor in tensors))

    def free_all(self) -> None:
        """Free all live blocks; the allocator keeps their memory."""
        self._free(*self._live)

    def _free(self, *addresses: int) -> None:
        for address in addresses:
            self._live.remove(address)
            self.allocator.free(address)

    def clear(self) -> None:
        """Return to the state of a program that was just started."""
        self.free_all()
        self.allocator.empty_cache()

    def set_utilization(self, ratio: float) -> None:
        """Publish the program's part of the device's utilization."""
        self._device.attach().set_utilization(ratio)


def allocators() -> list[CachingAllocator]:
    """Return the attached allocators of this process, one for each device."""
    return [allocator for allocator in _allocators.copy().values() if allocator.is_attached]


def _calls() -> list[dict[str, Any]]:
    """Return the calls that led here, innermost first, without those of this module."""
    calls: list[dict[str, Any]] = []
    frame = sys._getframe()
    while (outer := frame.f_back) is not None and len(calls) < MAX_CALLS:
        frame = outer
        if frame.f_code.co_filename != __file__:
            calls.append({"filename": frame.f_code.co_filename, "line": frame.f_lineno, "name": frame.f_code.co_name})
    return calls


def _segment_bytes(size: int) -> int:
    if size <= MAX_SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    return LARGE_SEGMENT_BYTES if size < MIN_HUGE_BYTES else _round_up(size, HUGE_ROUNDING_BYTES)


def _merge(block: _Block, after: _Block) -> None:
    block.size += after.size
    block.next = after.next
    if after.next is not None:
        after.next.previous = block


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


_allocators: WeakValueDictionary[str, CachingAllocator] = WeakValueDictionary()


def _after_fork() -> None:
    """Clear the allocators of a forked child: it has no context."""
    for allocator in _allocators.copy().values():
        allocator._clear()


os.register_at_fork(after_in_child=_after_fork)
