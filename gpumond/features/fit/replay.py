"""Replays the allocations of a trace through the simulated caching allocator: what a program holds at its peak."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpumond.facts.errors import GpumondError
from gpumond.facts.units import MIB
from gpumond.features.fit.tracer import ALLOCATE, FREE
from gpumond.sim.allocator import CachingAllocator
from gpumond.sim.device import OutOfMemory, Spec, create

WORKSPACE_BYTES = 32 * MIB
"""Workspace of cuBLAS on Hopper, in PyTorch's pool: one for the program's thread, one for that of backward passes."""
LARGEST = 1 << 50
CLASSES = ("parameters", "gradients", "optimizer")
REST = "activations and others"


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Bytes of a program at its peaks: ``live_bytes`` handed out, ``held_bytes`` taken from the device.

    ``classes`` are those of the live bytes, and ``step`` the number of the step in which they were highest.
    """

    live_bytes: int
    held_bytes: int
    classes: Mapping[str, int]
    step: int


class DoesNotFit(GpumondError):
    """The trace does not fit into the given size."""


def replay(trace: Mapping[str, Any], size_bytes: int = LARGEST) -> Need:
    """Return what a trace needs on a device of this size. Raises DoesNotFit."""
    classes: Mapping[str, str] = {str(number): name for number, name in trace["classes"].items()}
    entries: Sequence[tuple[str, int, int]] = trace["entries"]
    with tempfile.TemporaryDirectory() as directory:
        device = create(Path(directory) / "device", Spec("GPU-fit", 0, "fit", size_bytes, context_bytes=0))
        allocator = CachingAllocator(device)
        try:
            for _ in range(2 if trace["matmul"] else 0):
                allocator.malloc(WORKSPACE_BYTES)
            return _replayed(allocator, entries, classes)
        except OutOfMemory as error:
            raise DoesNotFit(str(error)) from None
        finally:
            allocator.close()


def _replayed(allocator: CachingAllocator, entries: Sequence[tuple[str, int, int]], classes: Mapping[str, str]) -> Need:
    addresses: dict[int, int] = {}
    totals: Counter[str] = Counter()
    at_peak: Mapping[str, int] = {}
    peak, held, step, step_of_peak = 0, 0, 1, 1
    for kind, number, size in entries:
        name = classes.get(str(number), REST)
        if kind == ALLOCATE:
            addresses[number] = allocator.malloc(size)
            totals[name] += size
            held = max(held, allocator.held_bytes)
            if allocator.live_bytes > peak:
                peak, at_peak, step_of_peak = allocator.live_bytes, dict(totals), step
        elif kind == FREE:
            allocator.free(addresses.pop(number))
            totals[name] -= size
        else:
            step = number + 1
    return Need(live_bytes=peak, held_bytes=held, classes=at_peak, step=step_of_peak)
