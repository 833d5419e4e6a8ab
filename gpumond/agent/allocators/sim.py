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

LIVE_CLASSES = ("parameters", "gradients", "optimizer", "buffers", "tensors", "activations")
"""Kinds of blocks, as `LiveClasses` names them."""


class SimAdapter(AllocatorAdapter, HistoryRecording, TensorTracking):
    name = "sim"
    flush_step = "cache"
    snapshot_suffix = ".json"

    def framework(self) -> str:
        return f"gpumond.sim {__version__}"

    def read(self, exact: bool = False) -> Sequence[PoolUsage]:
        return tuple(allocator.usage() for allocator in _allocators())

    def check(self) -> None:
        for allocator in _allocators():
            allocator.wait()

    def release(self) -> tuple[int, str]:
        return sum(allocator.empty_cache() for allocator in _allocators()), ""

    def limit(self, limit_bytes: int | None, device: str | int | None) -> Sequence[AppliedLimit]:
        allocators = _allocators()
        selected = [each for each in allocators if device in (None, each.device_uuid, each.device_index)]
        for allocator in selected:
            allocator.limit_bytes = limit_bytes
        return tuple(AppliedLimit("sim", allocator.device_uuid, limit_bytes, True) for allocator in selected)

    def dump(self, path: str, must_be_fast: bool) -> None:
        blocks = {allocator.device_uuid: allocator.blocks() for allocator in _allocators()}
        if not blocks:
            raise FlushRefused("nothing has been allocated yet")
        with open(path, "wb") as file:
            file.write(to_json(blocks))

    def live_classes(self, search_seconds: float = 0.0) -> Sequence[LiveClasses]:
        classes = []
        for allocator in _allocators():
            kinds, live = allocator.live_by_kind(), allocator.live_bytes
            sizes = {f"{name}_bytes": kinds.get(name, 0) for name in LIVE_CLASSES}
            if live:
                classes.append(
                    LiveClasses(allocator="sim", device_uuid=allocator.device_uuid, live_bytes=live, **sizes)
                )
        return classes

    def find_older_objects(self) -> None:
        """A simulated program's objects are all known."""

    def tracked_tensors(self) -> Sequence[TrackedTensor]:
        tensors = []
        for allocator in _allocators():
            with allocator.lock:
                tensors += [TrackedTensor(tensor, tensor.size_bytes, False) for tensor in allocator.tensors]
        return tensors

    def start_history(self) -> None:
        if not _allocators():
            raise FlushRefused("nothing has been allocated yet")
        for allocator in _allocators():
            allocator.set_recording(True)

    def live_sites(self) -> Sequence[AllocationSite]:
        return sites(self._segments())[0]

    def finish_history(self, write: Callable[[object], Dump]) -> tuple[Dump, Sequence[AllocationSite], int]:
        segments = self._segments()
        for allocator in _allocators():
            allocator.set_recording(False)
        return write({"segments": segments}), *sites(segments)

    def _segments(self) -> Sequence[Mapping[str, Any]]:
        return [{"blocks": allocator.live_blocks()} for allocator in _allocators()]

    def largest_free_bytes(self) -> Mapping[str, int]:
        return {
            allocator.device_uuid: max((size for _, size, is_free in allocator.blocks() if is_free), default=0)
            for allocator in _allocators()
        }


def adapter() -> SimAdapter:
    return SimAdapter()


def _allocators() -> Sequence[Any]:
    module = sys.modules.get("gpumond.sim.allocator")
    return () if module is None else module.allocators()
