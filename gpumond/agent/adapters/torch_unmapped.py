"""Segments of PyTorch's private pools whose pages a library has released: sleep modes of serving engines.

vLLM and torch_memory_saver, which SGLang uses, allocate from private pools. In sleep mode they release the pages and
keep the addresses, so that PyTorch's statistics do not change.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

SAVER, VLLM = "torch_memory_saver", "vllm.device_allocator.cumem"

Segments = Sequence[Mapping[str, Any]]


class UnmappedBytes(NamedTuple):
    """Bytes of the unmapped segments of one device, as PyTorch counts them."""

    held: int = 0
    live: int = 0
    active: int = 0
    split: int = 0


NOTHING = UnmappedBytes()


class UnmappedSegments:
    """``segments`` returns the allocator's segments, None if there are too many; ``is_mapped`` asks the driver."""

    def __init__(self, segments: Callable[[], Segments | None], is_mapped: Callable[[int], bool | None]) -> None:
        self._segments, self._is_mapped = segments, is_mapped
        self._counters: object = None
        self._private: Segments = ()
        self.addresses: frozenset[int] = frozenset()
        """Addresses of the unmapped segments at the last read."""

    def read(self, counters: object) -> Mapping[int, UnmappedBytes] | None:
        """Return the bytes by device; None if they are unknown.

        ``counters``: the allocator's counts of device allocations and frees. While they and the unmapped segments are
        equal, the segments are not read again.
        """
        if not _has_sleep_mode():
            self.addresses = frozenset()
            return None
        if counters != self._counters and not self._reread(counters):
            return None
        addresses = self._unmapped()
        if addresses is None:
            return None
        if addresses != self.addresses:
            if not self._reread(counters):
                return None
            self.addresses = addresses
        return summed(self._private, addresses) if addresses else {}

    def _reread(self, counters: object) -> bool:
        segments = self._segments()
        self._counters = None if segments is None else counters
        self._private = [each for each in segments or () if tuple(each.get("segment_pool_id", (0, 0))) != (0, 0)]
        return segments is not None

    def _unmapped(self) -> frozenset[int] | None:
        """Return the addresses of unmapped segments; None if the state of one is unknown."""
        known = _asleep_in_vllm()
        found = set()
        for segment in self._private:
            address = segment["address"]
            mapped = not known[address] if address in known else self._is_mapped(address)
            if mapped is None:
                return None
            if not mapped:
                found.add(address)
        return frozenset(found)


def summed(segments: Iterable[Mapping[str, Any]], addresses: frozenset[int]) -> dict[int, UnmappedBytes]:
    """Return the bytes of the segments at these addresses by device."""
    sums: dict[int, UnmappedBytes] = {}
    for segment in segments:
        if segment["address"] in addresses:
            total, live, active = (int(segment[f"{name}_size"]) for name in ("total", "allocated", "active"))
            split = total - active if live or active else 0
            own = sums.get(segment["device"], NOTHING)
            sums[segment["device"]] = UnmappedBytes(
                own.held + total, own.live + live, own.active + active, own.split + split
            )
    return sums


def _has_sleep_mode() -> bool:
    return SAVER in sys.modules or _vllm_allocator() is not None


def _vllm_allocator() -> Any:
    """Return the allocator, if the program has created it: ``get_instance()`` would create it."""
    return getattr(getattr(sys.modules.get(VLLM), "CuMemAllocator", None), "instance", None)


def _asleep_in_vllm() -> Mapping[int, bool]:
    """Return by address whether vLLM has released an allocation; empty for versions that do not record it."""
    allocations = getattr(_vllm_allocator(), "pointer_to_data", None) or {}
    return {pointer: bool(each.is_asleep) for pointer, each in list(allocations.items()) if hasattr(each, "is_asleep")}
