"""The simulated caching allocator. Its numbers are exact, and a flush returns what was predicted.

It is present only in a program that has imported the allocator.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from gpumond import __version__
from gpumond.agent.allocators import AllocatorAdapter, FlushRefused
from gpumond.facts.messages import to_json
from gpumond.facts.pools import PoolUsage
from gpumond.facts.program import AppliedLimit


class SimAdapter(AllocatorAdapter):
    name = "sim"
    step = "cache"
    suffix = ".json"

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

    def dump(self, path: str, guarded: bool) -> None:
        blocks = {each.device_uuid: each.blocks() for each in _allocators()}
        if not blocks:
            raise FlushRefused("nothing has been allocated yet")
        with open(path, "wb") as file:
            file.write(to_json(blocks))

    def largest_free_bytes(self) -> Mapping[str, int]:
        free = {each.device_uuid: [size for _, size, is_free in each.blocks() if is_free] for each in _allocators()}
        return {uuid: max(sizes, default=0) for uuid, sizes in free.items()}


def adapter() -> SimAdapter:
    return SimAdapter()


def _allocators() -> Sequence[Any]:
    module = sys.modules.get("gpumond.sim.allocator")
    return () if module is None else module.allocators()
