"""Segments and blocks, with the statistics of c10's caching allocator and its `empty_cache`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MIB = 1 << 20
ACTIVE, PENDING, FREE = "active_allocated", "active_pending_free", "inactive"


@dataclass
class Segment:
    """One cudaMalloc, or one mapped range of an expandable segment. ``blocks`` are sizes and states, in order."""

    blocks: list[tuple[int, str]]
    device: int = 0
    pool: tuple[int, int] = (0, 0)
    expandable: bool = False
    small: bool = False
    mapped: bool = True
    """False once a library has released its pages: the statistics do not change."""

    @property
    def address(self) -> int:
        return id(self)

    @property
    def size(self) -> int:
        return sum(size for size, _ in self.blocks)

    def bytes(self, *states: str) -> int:
        return sum(size for size, state in self.blocks if state in states)

    def settle(self) -> None:
        """Free the blocks that wait for an event, and merge free neighbors."""
        merged: list[tuple[int, str]] = []
        for size, state in self.blocks:
            state = FREE if state == PENDING else state
            if merged and state == FREE == merged[-1][1]:
                size += merged.pop()[0]
            merged.append((size, state))
        self.blocks = merged


@dataclass
class World:
    segments: list[Segment] = field(default_factory=list)
    devices: int = 1
    contexts: set[int] = field(default_factory=lambda: {0})
    current: int = 0
    initialized: bool = True
    bad_fork: bool = False
    backend: str = "native"
    settings: str = ""
    tells_private_pools: bool = True
    takes_include_traces: bool = True
    records_history: bool = False
    metadata: str = ""
    host: dict[str, int] | None = None
    plans: dict[int, int] = field(default_factory=dict)
    frees: int = 0
    allocations: int = 3
    calls: list[str] = field(default_factory=list)

    def reset(self, **values: Any) -> None:
        self.__init__(**values)  # type: ignore[misc]

    def held(self, device: int = 0) -> int:
        return sum(segment.size for segment in self.segments if segment.device == device)

    def stats(self, device: int) -> dict[str, Any]:
        mine = [segment for segment in self.segments if segment.device == device]
        split = [s.bytes(FREE) for s in mine if not s.expandable and len(s.blocks) > 1]
        values = {
            "reserved_bytes": self.held(device),
            "allocated_bytes": sum(s.bytes(ACTIVE) for s in mine),
            "active_bytes": sum(s.bytes(ACTIVE, PENDING) for s in mine),
            "inactive_split_bytes": sum(split),
            "segment": sum(not s.expandable for s in mine),
            "allocation": sum(state == ACTIVE for s in mine for _, state in s.blocks),
            "active": sum(state != FREE for s in mine for _, state in s.blocks),
            "inactive_split": len(split),
        }
        stats: dict[str, Any] = {name: {"all": {"current": v, "peak": v}} for name, v in values.items()}
        stats |= {
            "num_ooms": 1,
            "num_alloc_retries": 2,
            "num_device_alloc": self.allocations,
            "num_device_free": self.frees,
        }
        if self.tells_private_pools:
            private: dict[tuple[int, int], int] = {}
            for s in mine:
                if s.pool != (0, 0):
                    private[s.pool] = private.get(s.pool, 0) + s.size
            stats["reserved_bytes_by_private_pools"] = {p: {"all": {"current": v}} for p, v in private.items()}
        return stats

    def snapshot(self) -> list[dict[str, Any]]:
        return [
            {
                "device": s.device,
                "address": s.address,
                "total_size": s.size,
                "allocated_size": s.bytes(ACTIVE),
                "active_size": s.bytes(ACTIVE, PENDING),
                "segment_type": "small" if s.small else "large",
                "segment_pool_id": s.pool,
                "is_expandable": s.expandable,
                "blocks": [{"size": size, "state": state} for size, state in s.blocks],
            }
            for s in self.segments
        ]

    def empty_cache(self) -> int:
        """Return the released bytes of all devices. Private pools are in use."""
        before = sum(segment.size for segment in self.segments)
        kept = []
        for segment in self.segments:
            segment.settle()
            if segment.pool == (0, 0) and segment.expandable:
                _unmap(segment)
            if segment.pool != (0, 0) or len(segment.blocks) != 1 or segment.blocks[0][1] != FREE or segment.expandable:
                kept.append(segment)
            else:
                self.frees += 1
        self.segments = kept
        return before - sum(segment.size for segment in kept)


def _unmap(segment: Segment) -> None:
    page = (2 if segment.small else 20) * MIB
    blocks, offset = [], 0
    for size, state in segment.blocks:
        whole = (offset + size) // page * page - -(-offset // page) * page
        blocks.append((size - max(0, whole) if state == FREE else size, state))
        offset += size
    segment.blocks = blocks


WORLD = World()
