"""PyTorch's CUDA allocator (2.3 and later, and ROCm, which uses the same names).

It is read through the nested statistics: one call for each device, without flattening and without a CUDA call. A
PyTorch that has not initialized CUDA is not queried, and a device without a live context is never made current.
"""

from __future__ import annotations

import os
import pickle
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from gpumond.agent.allocators import cuda, torch_live_classes, torch_xpu
from gpumond.agent.allocators.adapters import (
    AllocatorAdapter,
    FlushRefused,
    HistoryRecording,
    TensorsBusy,
    TensorTracking,
    TrackedTensor,
    to_call,
)
from gpumond.agent.allocators.gil import tensors_unchanged
from gpumond.agent.allocators.mempools import bytes_left_by_trim
from gpumond.agent.allocators.torch_formulas import (
    LARGE_PAGE_BYTES,
    MIB,
    NO_UNMAPPED_BYTES,
    DeviceStatistics,
    UnmappedBytes,
    UnmappedSegments,
    current_value,
    device_statistics,
    is_shared,
    pool_usage,
    reclaimable_from_async_stats,
    reclaimable_from_snapshot,
    reclaimable_from_stats,
)
from gpumond.agent.allocators.torch_objects import TORCH_OBJECTS
from gpumond.facts.pools import HostPool, PoolUsage, Reclaimable, StepResult
from gpumond.facts.program import AllocationSite, AppliedLimit, Dump, LiveClasses
from gpumond.facts.units import plural

MAX_SNAPSHOT_BLOCKS = 50_000
"""Largest snapshot: it holds the allocator's lock and the GIL for some microseconds for each block."""

MAX_OOM_SNAPSHOT_BLOCKS = 5_000
"""Largest snapshot at an out-of-memory error, in the thread of the program."""

CONFIGURATION_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


class TorchAdapter(AllocatorAdapter, HistoryRecording, TensorTracking):
    name = "torch"
    main_thread_steps = frozenset(("workspaces", "plans"))
    """Another thread may be about to launch a kernel that uses one."""
    snapshot_suffix = ".pickle"

    def __init__(
        self,
        torch: Any,
        environ: Mapping[str, str] = os.environ,
        is_mapped: Callable[[int], bool | None] = cuda.is_mapped,
    ) -> None:
        self._torch, self._cuda, self._c = torch, torch.cuda, torch._C
        self._configuration = ",".join(environ.get(name, "") for name in CONFIGURATION_VARIABLES)
        self._uuids: dict[int, str | None] = {}
        self._own_fractions: dict[int, float] = {}
        self._unmapped_segments = UnmappedSegments(lambda: self._segments(MAX_OOM_SNAPSHOT_BLOCKS), is_mapped)
        cuda.watch_captures(torch.cuda.CUDAGraph)

    def read(self, exact: bool = False) -> Sequence[PoolUsage]:
        if not self._cuda.is_initialized():
            return ()
        backend = self._cuda.get_allocator_backend()
        if backend not in ("native", "cudaMallocAsync"):
            return ()
        is_native = backend == "native"
        has_context = self._context_query()
        devices: dict[int, DeviceStatistics] = {}
        for ordinal in range(self._device_count()):
            is_active = has_context(ordinal)
            if is_active is not False:
                statistics = device_statistics(self._c._cuda_memoryStats(ordinal), has_counters=is_native)
                if is_active or statistics.held_bytes:
                    devices[ordinal] = statistics
        unmapped = self._unmapped(devices.values()) if is_native else None
        snapshot = self._exact_reclaimable() if exact and is_native else None
        is_expandable = is_native and "expandable_segments:true" in self._allocator_settings()
        pools = []
        for ordinal, statistics in devices.items():
            uuid = self._uuid(ordinal)
            if uuid is None:
                continue
            unmapped_bytes = None
            if unmapped is not None:
                unmapped_here = unmapped.get(ordinal, NO_UNMAPPED_BYTES)
                statistics, unmapped_bytes = statistics.without(unmapped_here), unmapped_here.held_bytes
            if snapshot is not None:
                reclaimable = snapshot.get(ordinal, Reclaimable(0, 0, 0))
            elif is_native:
                reclaimable = reclaimable_from_stats(statistics, is_expandable)
            else:
                reclaimable = reclaimable_from_async_stats(statistics)
            pools.append(pool_usage(uuid, statistics, reclaimable, unmapped_bytes))
        return tuple(pools)

    def _unmapped(self, devices: Iterable[DeviceStatistics]) -> Mapping[int, UnmappedBytes] | None:
        counters = tuple((each.device_allocations, each.device_frees) for each in devices)
        try:
            return self._unmapped_segments.read(counters)
        except Exception:  # a version of the library that is not understood
            return None

    def bytes_left_by_flush(self) -> Mapping[str, int]:
        if not self._cuda.is_initialized() or self._cuda.get_allocator_backend() != "cudaMallocAsync":
            return {}
        stats = self._c._cuda_memoryStats
        return bytes_left_by_trim(
            (ordinal, current_value(stats(ordinal), "allocated_bytes")) for ordinal in cuda.devices_with_context()
        )

    def host_pools(self) -> Sequence[HostPool]:
        """Return the cache of pinned host memory (2.7 and later); its blocks are powers of two."""
        query = getattr(self._c, "_cuda_hostMemoryStats", None)
        if query is None or not self._cuda.is_initialized():
            return ()
        stats = query()
        held, live = (int(stats.get(f"{name}_bytes", {}).get("current", 0)) for name in ("allocated", "active"))
        return (HostPool("torch", live, held),) if held else ()

    def check(self) -> None:
        self._live_devices()

    def flush(self, steps: Sequence[str]) -> Sequence[StepResult]:
        with self._on_live_device():
            if {"workspaces", "plans"}.intersection(steps) and cuda.CAPTURED_GRAPHS:
                raise FlushRefused("a captured CUDA graph may use a cuBLAS workspace or a cuFFT plan")
            calls = {
                "ipc": getattr(self._c, "_cuda_ipc_collect", None),
                "workspaces": getattr(self._c, "_cuda_clearCublasWorkspaces", None),
                "plans": self._clear_plans if hasattr(self._torch, "_cufft_clear_plan_cache") else None,
                "cache": self._cuda.empty_cache,
                "host": self._empty_host_cache if hasattr(self._c, "_host_emptyCache") else None,
            }
            return tuple(self._run_step(step, call) for step, call in calls.items() if step in steps and call)

    def _run_step(self, step: str, call: Callable[[], object]) -> StepResult:
        held, started = self._held_bytes(), time.perf_counter()
        detail = call()
        seconds = time.perf_counter() - started
        return StepResult(step, max(0, held - self._held_bytes()), seconds, detail if isinstance(detail, str) else "")

    def _clear_plans(self) -> str:
        """Clear the cuFFT plans of each device. The work areas of plans are blocks of the allocator."""
        ordinals = self._live_devices()
        plans = sum(self._torch._cufft_get_plan_cache_size(ordinal) for ordinal in ordinals)
        for ordinal in ordinals:
            self._torch._cufft_clear_plan_cache(ordinal)
        return plural(plans, "cuFFT plan")

    def _empty_host_cache(self) -> str:
        """Empty the cache of pinned host memory (2.5 and later), which isn't device memory."""
        before = sum(pool.held_bytes for pool in self.host_pools())
        self._c._host_emptyCache()
        return f"{before - sum(pool.held_bytes for pool in self.host_pools())} bytes of host memory"

    def limit(self, limit_bytes: int | None, device: str | int | None) -> Sequence[AppliedLimit]:
        """Set the fraction of each device that the allocator may hold; without a limit, the program's own fraction."""
        applied = []
        with self._live_sizes() as sizes:
            for ordinal, uuid, size in sizes:
                if device in (None, ordinal, uuid):
                    own_fraction = self._own_fractions.setdefault(ordinal, self._own_fraction(ordinal))
                    fraction = own_fraction if limit_bytes is None else min(1.0, limit_bytes / size)
                    self._c._cuda_setMemoryFraction(fraction, ordinal)
                    applied.append(AppliedLimit("torch", uuid, limit_bytes, True))
        return applied

    def own_limits(self) -> Mapping[str, int]:
        with self._live_sizes() as sizes:
            fractions = [(uuid, self._own_fraction(ordinal), size) for ordinal, uuid, size in sizes]
        return {uuid: int(fraction * size) for uuid, fraction, size in fractions if uuid is not None and fraction < 1.0}

    @contextmanager
    def _live_sizes(self) -> Iterator[Sequence[tuple[int, str | None, int]]]:
        """Yield each device with a live context. Queries of sizes and changes of fractions make a device current."""
        with self._on_live_device():
            before = self._c._cuda_getDevice()
            try:
                ordinals, query = self._live_devices(), self._cuda.get_device_properties
                yield [(ordinal, self._uuid(ordinal), query(ordinal).total_memory) for ordinal in ordinals]
            finally:
                self._c._cuda_maybeExchangeDevice(before)

    def _own_fraction(self, ordinal: int) -> float:
        query = getattr(self._c, "_cuda_getMemoryFraction", None)  # 2.6
        return self._own_fractions.get(ordinal) or (float(query(ordinal)) if query else 1.0)

    def dump(self, path: str, must_be_fast: bool) -> None:
        """Write PyTorch's snapshot for pytorch.org/memory_viz, with the blocks' classes and any recorded history."""
        self._check_snapshot(must_be_fast)
        snapshot = self._annotated_snapshot()
        with open(path, "wb") as file:
            pickle.dump(snapshot, file)

    def _annotated_snapshot(self) -> Mapping[str, Any]:
        snapshot: Mapping[str, Any] = self._cuda.memory._snapshot()
        with suppress(TensorsBusy):  # the snapshot then has no classes
            torch_live_classes.annotate(self._torch, "cuda", snapshot)
        return snapshot

    def _check_snapshot(self, must_be_fast: bool) -> None:
        if not self._cuda.is_initialized():
            raise FlushRefused("CUDA isn't initialized")
        if self._cuda.get_allocator_backend() != "native":
            raise FlushRefused("only the native allocator has a snapshot")
        if must_be_fast and self._c._cuda_isHistoryEnabled():
            raise FlushRefused(
                "the program records its memory history, which may take long to copy; call snapshot() in the program"
            )
        if must_be_fast and (blocks := self._block_count()) > MAX_SNAPSHOT_BLOCKS:
            raise FlushRefused(f"{blocks} blocks would stall the program; call snapshot() in the program")

    def annotate(self, text: str) -> Callable[[], object] | None:
        set_metadata = getattr(self._c, "_cuda_setMemoryMetadata", None)  # of a thread; not before 2.10
        if set_metadata is None or not self._cuda.is_initialized() or not self._c._cuda_isHistoryEnabled():
            return None
        before = self._c._cuda_getMemoryMetadata()
        set_metadata(text)
        return partial(set_metadata, before)

    def start_history(self) -> None:
        self._check_snapshot(must_be_fast=True)
        # Python stacks only: those of C++ would take longer to unwind.
        self._cuda.memory._record_memory_history(
            enabled="all", context="all", stacks="python", max_entries=MAX_HISTORY_ENTRIES
        )

    def live_sites(self) -> Sequence[AllocationSite]:
        if not self._cuda.is_initialized() or not self._c._cuda_isHistoryEnabled():
            return ()
        live_sites, _ = sites(self._segments(MAX_OOM_SNAPSHOT_BLOCKS) or ())
        return live_sites

    def finish_history(self, write: Callable[[object], Dump]) -> tuple[Dump, Sequence[AllocationSite], int]:
        memory = self._cuda.memory
        try:
            snapshot = self._annotated_snapshot()
        finally:
            memory._record_memory_history(enabled=None)
        return write(snapshot), *sites(snapshot["segments"])

    @contextmanager
    def _on_live_device(self) -> Iterator[None]:
        """Make a device with a live context current. Freeing needs a current device, and a thread without one would
        create a context on device 0 (pytorch#25752). Raises FlushRefused while nothing may be freed.
        """
        ordinals = self._live_devices()
        before = self._c._cuda_getDevice()
        if before in ordinals:
            yield
            return
        self._c._cuda_setDevice(ordinals[0])
        try:
            yield
        finally:
            self._c._cuda_maybeExchangeDevice(before)  # creates no context either

    def _live_devices(self) -> Sequence[int]:
        """Return the devices with a live context. Raises FlushRefused while nothing may be freed."""
        if not self._cuda.is_initialized():
            forked = self._cuda._is_in_bad_fork()
            raise FlushRefused(
                "CUDA was initialized before this process was forked"
                if forked
                else "CUDA isn't initialized: the program hasn't used a device yet"
            )
        backend = self._cuda.get_allocator_backend()
        if backend not in ("native", "cudaMallocAsync"):
            raise FlushRefused(f"the allocator is {backend}, not one of PyTorch's own")
        if cuda.is_capturing():
            raise FlushRefused("a CUDA graph is being captured")
        ordinals = list(filter(self._context_query(), range(self._device_count())))
        if not ordinals:
            raise FlushRefused("no device has a live CUDA context")
        return ordinals

    def _device_count(self) -> int:
        return len(self._cuda.default_generators)  # device_count() would query the driver

    def _context_query(self) -> Callable[[int], bool | None]:
        """Return a function that returns whether a device has a context; None if that is unknown."""
        return getattr(self._c, "_cuda_hasPrimaryContext", cuda.has_context)

    def _held_bytes(self) -> int:
        stats = map(self._c._cuda_memoryStats, range(self._device_count()))
        return sum(current_value(each, "reserved_bytes") for each in stats)

    def _uuid(self, ordinal: int) -> str | None:
        if ordinal not in self._uuids:
            uuid = cuda.device_uuid(ordinal)
            if uuid is None:
                properties = self._cuda.get_device_properties(ordinal)
                torch_uuid = getattr(properties, "uuid", None)
                if getattr(self._torch.version, "hip", None):
                    uuid = torch_xpu.amd_device_uuid(properties)
                else:
                    uuid = None if torch_uuid is None else f"GPU-{torch_uuid}"
            self._uuids[ordinal] = uuid
        return self._uuids[ordinal]

    def _allocator_settings(self) -> str:
        query = getattr(self._c, "_accelerator_getAllocatorSettings", None)  # since 2.12; includes changes at run time
        return f"{self._configuration},{query() if query else ''}".lower()

    def largest_free_bytes(self) -> Mapping[str, int]:
        """Return the largest free block in the cache of each device; empty if there are too many blocks.

        Blocks of private pools (CUDA graphs) don't count: no other request can use them.
        """
        is_native = self._cuda.is_initialized() and self._cuda.get_allocator_backend() == "native"
        largest: dict[str, int] = {}
        for segment in (self._segments(MAX_OOM_SNAPSHOT_BLOCKS) if is_native else None) or ():
            if not is_shared(segment):
                continue
            free = [block["size"] for block in segment["blocks"] if block["state"] == "inactive"]
            uuid = self._uuid(segment["device"])
            if uuid is not None:
                largest[uuid] = max(largest.get(uuid, 0), *free, 0)
        return largest

    def live_classes(self, search_seconds: float = 0.0) -> Sequence[LiveClasses]:
        if not self._cuda.is_initialized() or not any(self._live_bytes().values()):
            return ()
        bytes_by_class = torch_live_classes.measure_classes(self._torch, "cuda", search_seconds)
        return tuple(
            torch_live_classes.classes_of_device(bytes_by_class, ordinal, self.name, uuid, size)
            for ordinal, size in self._live_bytes().items()  # again: a search takes time
            if size and (uuid := self._uuid(ordinal)) is not None
        )

    def _live_bytes(self) -> Mapping[int, int]:
        stats = self._c._cuda_memoryStats
        return {ordinal: current_value(stats(ordinal), "allocated_bytes") for ordinal in range(self._device_count())}

    def find_older_objects(self) -> None:
        TORCH_OBJECTS.install()
        version = self._torch.version
        if TORCH_OBJECTS.needs_search and (getattr(version, "cuda", None) or version.hip):  # not a build for the CPU
            with tensors_unchanged(0):
                torch_live_classes.search_heap(self._torch)

    def tracked_tensors(self) -> Sequence[TrackedTensor]:
        return torch_live_classes.tracked_tensors(self._torch, "cuda") if self._cuda.is_initialized() else ()

    def _segments(self, max_blocks: int) -> Sequence[Mapping[str, Any]] | None:
        """Return all segments with their blocks; None if there are too many blocks."""
        if self._block_count() > max_blocks:
            return None
        snapshot = self._cuda.memory.memory_snapshot
        try:
            return snapshot(include_traces=False)  # type: ignore[no-any-return]
        except TypeError:  # before 2.11 it would include the whole recorded history
            return None if self._c._cuda_isHistoryEnabled() else snapshot()

    def _block_count(self) -> int:
        stats = [self._c._cuda_memoryStats(ordinal) for ordinal in range(self._device_count())]
        return sum(current_value(each, "active") + current_value(each, "inactive_split") for each in stats)

    def _exact_reclaimable(self) -> dict[int, Reclaimable] | None:
        """Return exact values from the blocks; None if there are too many blocks."""
        segments = self._segments(MAX_SNAPSHOT_BLOCKS)
        if segments is None:
            return None
        page_match = re.search(r"large_segment_size_mb:(\d+)", self._allocator_settings())
        segments = [each for each in segments if each.get("address") not in self._unmapped_segments.addresses]
        return reclaimable_from_snapshot(segments, int(page_match[1]) * MIB if page_match else LARGE_PAGE_BYTES)


def adapter() -> TorchAdapter | None:
    """Return None for a build for XPU, which has no CUDA."""
    torch = sys.modules["torch"]
    return None if getattr(torch._C, "_has_xpu", False) else TorchAdapter(torch)


def counts_default_pool(ordinal: int) -> bool:
    """Return whether PyTorch's statistics are those of the device's default memory pool."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized() or torch.cuda.get_allocator_backend() != "cudaMallocAsync":
        return False
    return ordinal < len(torch.cuda.default_generators) and bool(
        current_value(torch._C._cuda_memoryStats(ordinal), "reserved_bytes")
    )


MAX_HISTORY_ENTRIES = 10_000
"""Number of recorded allocations and frees. The copy of the record holds the GIL: 2 ms were measured for 2,000. The
first copy also imports ``torch._inductor``, as PyTorch looks for compiled code among the frames: 4 s of the agent's
thread.
"""
MAX_CALLS = 12
CallStack = tuple[tuple[str, int, str], ...]


def sites(segments: Iterable[Mapping[str, Any]]) -> tuple[Sequence[AllocationSite], int]:
    """Return live memory by the stack that allocated it, largest first, and the bytes of blocks without a stack."""
    totals: dict[CallStack, list[int]] = {}
    unrecorded = 0
    for segment in segments:
        for block in segment["blocks"]:
            if block["state"] != "active_allocated":
                continue
            stack = _stack(block.get("frames") or ())
            if not stack:
                unrecorded += block["size"]
                continue
            total = totals.setdefault(stack, [0, 0])
            total[0] += block["size"]
            total[1] += 1
    ordered = sorted(totals.items(), key=lambda entry: -entry[1][0])
    return [
        AllocationSite(size, blocks, tuple(to_call(*call) for call in stack)) for stack, (size, blocks) in ordered
    ], unrecorded


def _stack(frames: Iterable[Mapping[str, Any]]) -> CallStack:
    calls = ((frame["filename"], int(frame["line"]), frame["name"]) for frame in frames)
    return tuple(call for call in calls if _is_python(call[0]))[:MAX_CALLS]


def _is_python(file: str) -> bool:
    """Return whether a stack names the program's Python source, ``<stdin>`` included, and not C++."""
    return file.endswith(".py") or (file.startswith("<") and not file.startswith("<frozen "))
