"""The simulated caching allocator. Its numbers are exact, and a flush returns what was predicted.

It is present only in a program that has imported the allocator.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpumond import __version__
from gpumond.agent.allocators.adapters import (
    AllocatorAdapter,
    FlushRefused,
    HistoryRecording,
    TensorTracking,
    TrackedTensor,
)
from gpumond.agent.allocators.torch import sites
from gpumond.facts.messages import to_json
from gpumond.facts.pools import PoolUsage
from gpumond.facts.program import AllocationSite, AppliedLimit, Dump, LiveClasses

CLASSES = ("parameters", "gradients", "optimizer", "buffers", "tensors", "activations")
"""Kinds of blocks, as `LiveClasses` names them."""


class SimAdapter(AllocatorAdapter, HistoryRecording, TensorTracking):
    name = "sim"
    flush_step = "cache"
    snapshot_suffix = ".json"

    def framework(self) -> str:
        return f"gpumond.sim {__version__}"

    def read(self, exact: bool = False) -> Sequence[PoolUsage]:
        return tuple(each.usage() for each in _allocators())

    def check(self) -> None:
        for allocator in _allocators():
            allocator.wait()

    def release(self) -> tuple[int, str]:
        return sum(allocator.empty_cache() for allocator in _allocators()), ""

    def limit(self, limit_bytes: int | None, device: str | int | None) -> Sequence[AppliedLimit]:
        selected = [each for each in _allocators() if device in (None, each.device_uuid, each.device_index)]
        for allocator in selected:
            allocator.limit_bytes = limit_bytes
        return tuple(AppliedLimit("sim", each.device_uuid, limit_bytes, True) for each in selected)

    def dump(self, path: str, must_be_fast: bool) -> None:
        blocks = {each.device_uuid: each.blocks() for each in _allocators()}
        if not blocks:
            raise FlushRefused("nothing has been allocated yet")
        with open(path, "wb") as file:
            file.write(to_json(blocks))

    def live_classes(self, search_seconds: float = 0.0) -> Sequence[LiveClasses]:
        found = []
        for each in _allocators():
            kinds, live = each.live_by_kind(), each.live_bytes
            sizes = {f"{name}_bytes": kinds.get(name, 0) for name in CLASSES}
            if live:
                found.append(LiveClasses(allocator="sim", device_uuid=each.device_uuid, live_bytes=live, **sizes))
        return found

    def find_older_objects(self) -> None:
        """A simulated program's objects are all known."""

    def tracked_tensors(self) -> Sequence[TrackedTensor]:
        found = []
        for each in _allocators():
            with each.lock:
                found += [TrackedTensor(tensor, tensor.size_bytes, False) for tensor in each.tensors]
        return found

    def start_history(self) -> None:
        if not _allocators():
            raise FlushRefused("nothing has been allocated yet")
        for each in _allocators():
            each.set_recording(True)

    def live_sites(self) -> Sequence[AllocationSite]:
        return sites(self._segments())[0]

    def finish_history(self, write: Callable[[object], Dump]) -> tuple[Dump, Sequence[AllocationSite], int]:
        segments = self._segments()
        for each in _allocators():
            each.set_recording(False)
        return write({"segments": segments}), *sites(segments)

    def _segments(self) -> Sequence[Mapping[str, Any]]:
        return [{"blocks": each.live_blocks()} for each in _allocators()]

    def largest_free_bytes(self) -> Mapping[str, int]:
        free = {each.device_uuid: [size for _, size, is_free in each.blocks() if is_free] for each in _allocators()}
        return {uuid: max(sizes, default=0) for uuid, sizes in free.items()}


def adapter() -> SimAdapter:
    return SimAdapter()


def _allocators() -> Sequence[Any]:
    module = sys.modules.get("gpumond.sim.allocator")
    return () if module is None else module.allocators()
