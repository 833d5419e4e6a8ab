"""Bytes that a flush of PyTorch's CUDA allocator returns, from its statistics or from its snapshot. Without I/O.

Bytes of one device, ``.all.current`` of the nested statistics: R reserved, A allocated (handed out), V active (A and
blocks that wait for the event of a stream), I inactive_split (free pieces of partly used segments), P reserved by
private pools (CUDA graphs, MemPool; reported since 2.13).

``empty_cache`` waits for the pending V - A, then returns whole free segments of the default pools
(c10/cuda/CUDACachingAllocator.cpp, release_cached_blocks). Hence R - V - I is exact as long as nothing is pending and
there are no private pools and no expandable segments: pending blocks may join free neighbors, a live private pool
returns nothing, and of an expandable segment only whole pages return, which the statistics do not show.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gpumond.facts.pools import PoolUsage, Reclaimable

Stats = Mapping[str, Any]

MIB = 1 << 20
SMALL_PAGE_BYTES = 2 * MIB
LARGE_PAGE_BYTES = 20 * MIB


class DeviceStatistics(NamedTuple):
    """The statistics of one device that are used. ``private_bytes``: bytes of private pools, None before 2.13."""

    held_bytes: int
    live_bytes: int
    active_bytes: int
    split_bytes: int
    segments: int
    private_bytes: int | None
    peak_held_bytes: int
    peak_live_bytes: int
    ooms: int | None
    retries: int | None
    device_allocations: int | None
    device_frees: int | None
    live_allocations: int | None

    def without(self, unmapped: UnmappedBytes) -> DeviceStatistics:
        """Return the figures without unmapped segments, which may have been read a moment before. The number of live
        allocations is then unknown, because it includes those of unmapped segments.
        """
        return self._replace(
            held_bytes=max(0, self.held_bytes - unmapped.held_bytes),
            live_bytes=max(0, self.live_bytes - unmapped.live_bytes),
            active_bytes=max(0, self.active_bytes - unmapped.active_bytes),
            split_bytes=max(0, self.split_bytes - unmapped.split_bytes),
            private_bytes=None if self.private_bytes is None else max(0, self.private_bytes - unmapped.held_bytes),
            live_allocations=None if unmapped.held_bytes else self.live_allocations,
        )


def current_value(stats: Stats, name: str) -> int:
    statistic = stats.get(name)
    return int(statistic["all"]["current"]) if statistic else 0


def device_statistics(stats: Stats, has_counters: bool = True) -> DeviceStatistics:
    """Extract the statistics. ``has_counters``: the backend keeps the counters; the other backend leaves them at 0.

    Raises KeyError for the statistics of another allocator.
    """
    held, live = stats["reserved_bytes"]["all"], stats["allocated_bytes"]["all"]
    private_pools = stats.get("reserved_bytes_by_private_pools")
    read_counter = (stats if has_counters else {}).get
    return DeviceStatistics(
        held_bytes=held["current"],
        live_bytes=live["current"],
        active_bytes=stats["active_bytes"]["all"]["current"],
        split_bytes=stats["inactive_split_bytes"]["all"]["current"],
        segments=stats["segment"]["all"]["current"],
        private_bytes=None if private_pools is None else sum(pool["all"]["current"] for pool in private_pools.values()),
        peak_held_bytes=held["peak"],
        peak_live_bytes=live["peak"],
        ooms=read_counter("num_ooms"),
        retries=read_counter("num_alloc_retries"),
        device_allocations=read_counter("num_device_alloc"),
        device_frees=read_counter("num_device_free"),
        live_allocations=stats["allocation"]["all"]["current"] if has_counters else None,
    )


def reclaimable_from_stats(statistics: DeviceStatistics, is_expandable: bool = False) -> Reclaimable:
    """Return the bytes for the native allocator. ``is_expandable``: the configuration permits expandable segments.

    For the likely value, private pools are assumed to be as full as all pools together.
    """
    held, live, active, split, segments, private = statistics[:6]
    if is_expandable or (held and not segments):
        return Reclaimable(0, max(0, held - live - split), max(0, held - live), "interval")
    idle = max(0, held - active - split)
    if private == 0 and active == live:
        return Reclaimable(idle, idle, idle, "exact")
    cached = max(0, held - live - split)
    low = 0 if private is None else max(0, idle - private)
    locked = (private or 0) * (held - live) // held if held else 0
    high = cached if active == live else max(0, held - live)
    return Reclaimable(low, max(low, cached - locked), high, "interval")


def reclaimable_from_async_stats(statistics: DeviceStatistics) -> Reclaimable:
    """Return the bytes for cudaMallocAsync: the driver's pool returns unused memory in pieces of unknown size."""
    cached = max(0, statistics.held_bytes - statistics.live_bytes)
    return Reclaimable(0, cached, cached, "interval")


def reclaimable_from_snapshot(
    segments: Iterable[Mapping[str, Any]], large_page_bytes: int = LARGE_PAGE_BYTES
) -> dict[int, Reclaimable]:
    """Return the bytes for the native allocator by device. Private pools return all or nothing; the rest is exact."""
    returned: defaultdict[int, int] = defaultdict(int)
    private: defaultdict[int, int] = defaultdict(int)
    for segment in segments:
        if segment.get("is_expandable"):
            idle = _whole_pages(segment, SMALL_PAGE_BYTES if segment["segment_type"] == "small" else large_page_bytes)
        else:
            idle = 0 if segment["allocated_size"] else segment["total_size"]
        (returned if is_shared(segment) else private)[segment["device"]] += idle
    return {
        device: Reclaimable(
            low=returned[device],
            likely=returned[device],
            high=returned[device] + private[device],
            exactness="interval" if private[device] else "exact",
        )
        for device in {*returned, *private}
    }


def is_shared(segment: Mapping[str, Any]) -> bool:
    """Return whether a segment serves all requests, and is in no private pool."""
    return tuple(segment.get("segment_pool_id", (0, 0))) == (0, 0)


def _whole_pages(segment: Mapping[str, Any], page_bytes: int) -> int:
    """Return the bytes of the pages that lie entirely in a free run. A mapped range starts on a page boundary."""
    total, start, offset = 0, 0, 0
    for block in [*segment["blocks"], {"state": "active_allocated", "size": 0}]:
        if block["state"] == "active_allocated":
            total += max(0, offset // page_bytes * page_bytes - -(-start // page_bytes) * page_bytes)
            start = offset + block["size"]
        offset += block["size"]
    return total


def pool_usage(
    uuid: str, statistics: DeviceStatistics, reclaimable: Reclaimable, unmapped_bytes: int | None
) -> PoolUsage:
    """Return the pool of a device. ``unmapped_bytes``: None if unknown."""
    cached = max(0, statistics.held_bytes - statistics.live_bytes)
    if reclaimable.high > cached:  # a snapshot is older than the statistics
        reclaimable = Reclaimable(
            min(reclaimable.low, cached), min(reclaimable.likely, cached), cached, reclaimable.exactness
        )
    return PoolUsage(
        allocator="torch",
        device_uuid=uuid,
        live_bytes=statistics.live_bytes,
        held_bytes=statistics.held_bytes,
        reclaimable=reclaimable,
        stranded_bytes=cached - reclaimable.likely,
        peak_live_bytes=statistics.peak_live_bytes,
        peak_held_bytes=statistics.peak_held_bytes,
        ooms=statistics.ooms,
        retries=statistics.retries,
        device_allocations=statistics.device_allocations,
        device_frees=statistics.device_frees,
        unmapped_bytes=unmapped_bytes,
        private_bytes=statistics.private_bytes,
        live_allocations=statistics.live_allocations,
    )


SAVER_MODULE, VLLM_MODULE = "torch_memory_saver", "vllm.device_allocator.cumem"

Segments = Sequence[Mapping[str, Any]]


class UnmappedBytes(NamedTuple):
    """Bytes of the unmapped segments of one device, as PyTorch counts them."""

    held_bytes: int = 0
    live_bytes: int = 0
    active_bytes: int = 0
    split_bytes: int = 0


NO_UNMAPPED_BYTES = UnmappedBytes()


class UnmappedSegments:
    """``segments`` returns the allocator's segments, None if there are too many; ``is_mapped`` asks the driver."""

    def __init__(self, segments: Callable[[], Segments | None], is_mapped: Callable[[int], bool | None]) -> None:
        self._segments, self._is_mapped = segments, is_mapped
        self._last_counters: object = None
        self._private_segments: Segments = ()
        self.addresses: frozenset[int] = frozenset()
        """Addresses of the unmapped segments at the last read."""

    def read(self, counters: object) -> Mapping[int, UnmappedBytes] | None:
        """Return the bytes by device; None if they are unknown.

        ``counters``: the allocator's counts of device allocations and frees. While they and the unmapped segments are
        equal, the segments are not read again.
        """
        if SAVER_MODULE not in sys.modules and _vllm_allocator() is None:
            self.addresses = frozenset()
            return None
        if counters != self._last_counters and not self._read_segments(counters):
            return None
        addresses = self._unmapped_addresses()
        if addresses is None:
            return None
        if addresses != self.addresses:
            if not self._read_segments(counters):
                return None
            self.addresses = addresses
        return unmapped_by_device(self._private_segments, addresses) if addresses else {}

    def _read_segments(self, counters: object) -> bool:
        segments = self._segments()
        self._last_counters = None if segments is None else counters
        self._private_segments = [segment for segment in segments or () if not is_shared(segment)]
        return segments is not None

    def _unmapped_addresses(self) -> frozenset[int] | None:
        """Return the addresses of unmapped segments; None if the state of one is unknown."""
        unmapped_by_address = _unmapped_by_vllm()
        addresses = set()
        for segment in self._private_segments:
            address = segment["address"]
            mapped = not unmapped_by_address[address] if address in unmapped_by_address else self._is_mapped(address)
            if mapped is None:
                return None
            if not mapped:
                addresses.add(address)
        return frozenset(addresses)


def unmapped_by_device(segments: Iterable[Mapping[str, Any]], addresses: frozenset[int]) -> dict[int, UnmappedBytes]:
    """Return the bytes of the segments at these addresses by device."""
    sums: dict[int, UnmappedBytes] = {}
    for segment in segments:
        if segment["address"] in addresses:
            total, live_bytes, active_bytes = (
                int(segment[f"{name}_size"]) for name in ("total", "allocated", "active")
            )
            split_bytes = total - active_bytes if live_bytes or active_bytes else 0
            before = sums.get(segment["device"], NO_UNMAPPED_BYTES)
            sums[segment["device"]] = UnmappedBytes(
                before.held_bytes + total,
                before.live_bytes + live_bytes,
                before.active_bytes + active_bytes,
                before.split_bytes + split_bytes,
            )
    return sums


def _vllm_allocator() -> Any:
    """Return the allocator, if the program has created it: ``get_instance()`` would create it."""
    return getattr(getattr(sys.modules.get(VLLM_MODULE), "CuMemAllocator", None), "instance", None)


def _unmapped_by_vllm() -> Mapping[int, bool]:
    """Return by address whether vLLM has released an allocation; empty for versions that do not record it."""
    allocations = getattr(_vllm_allocator(), "pointer_to_data", None) or {}
    return {pointer: bool(each.is_asleep) for pointer, each in list(allocations.items()) if hasattr(each, "is_asleep")}
