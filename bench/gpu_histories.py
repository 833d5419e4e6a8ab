"""On a real device: accuracy of flush predictions over random histories of allocations, for each allocator.

Each allocator has its own process. A history allocates and frees blocks of random sizes, predicts by a dry run,
flushes, and compares the receipt with the driver's count for the whole (otherwise idle) device.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, NamedTuple

from bench.result import publish
from gpumond.facts.pools import Receipt

HISTORIES = 30
STEPS = 400
GRANULE_BYTES = 32 << 20
"""Granularity with which stream-ordered pools of the driver grow and shrink, as observed."""
ALLOCATORS = {
    "torch-native": ("torch", {}),
    "torch-expandable": ("torch", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    "torch-async": ("torch", {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}),
    "cupy": ("cupy", {}),
    "cupy-async": ("cupy", {}),
    "cupy-async, one block unowned": ("cupy", {}),
    "rmm-async": ("rmm", {}),
}


class Block(NamedTuple):
    ptr: int
    size: int


UNOWNED: list[Block] = []
"""Blocks of the pool that no Python object owns."""


def main() -> None:
    if len(sys.argv) == 2 and sys.argv[1] in ALLOCATORS:
        print(json.dumps(histories(sys.argv[1])))
        return
    publish("gpu_histories", {name: summary(name) for name in ALLOCATORS})


def summary(name: str) -> dict[str, object]:
    library, environ = ALLOCATORS[name]
    if find_spec(library) is None:
        return {"skipped": f"needs {library}"}
    command = [sys.executable, "-m", "bench.gpu_histories", name]
    done = subprocess.run(command, env=os.environ | environ, capture_output=True, text=True, timeout=200)
    if done.returncode:
        return {"failed": done.stderr[-600:]}
    runs = json.loads(done.stdout.splitlines()[-1])
    errors = [abs(run["released"] - run["likely"]) / run["held"] for run in runs]
    return {
        "histories": len(runs),
        "within": sum(run["low"] <= run["released"] <= run["high"] for run in runs),
        "exact": sum(run["exactness"] == "exact" for run in runs),
        "error_of_held_median": round(statistics.median(errors), 5),
        "error_of_held_max": round(max(errors), 5),
        "driver_difference_mib_max": max(abs(run["driver"] - run["released"]) for run in runs) / 2**20,
        "left_what_live_blocks_touch": sum(run["held"] - run["released"] == run["touched"] for run in runs),
        "forecast_that": sum(run["held"] - run["likely"] == run["touched"] for run in runs),
        "milliseconds_of_a_plan_median": round(1e3 * statistics.median(run["plan_seconds"] for run in runs), 2),
        "outcomes": sorted({run["outcome"] for run in runs}),
        "overhead_mib": round(statistics.median(run["overhead"] for run in runs) / 2**20, 1),
    }


def histories(name: str) -> list[dict[str, object]]:
    """Run random histories in this process, and return the expected, released and driver-counted bytes of each."""
    import pynvml

    pynvml.nvmlInit()
    device = pynvml.nvmlDeviceGetHandleByIndex(0)

    def used() -> int:
        return int(pynvml.nvmlDeviceGetMemoryInfo(device, version=pynvml.nvmlMemory_v2).used)

    empty = used()
    allocate, settle = _allocator(name)
    return [_history(random.Random(seed), allocate, settle, used, empty) for seed in range(HISTORIES)]


def _history(
    draw: random.Random,
    allocate: Callable[[int], Any],
    settle: Callable[[], None],
    used: Callable[[], int],
    empty: int,
) -> dict[str, object]:
    from gpumond import agent

    blocks: list[Any] = []
    for _ in range(STEPS):
        if blocks and draw.random() < 0.45:
            blocks.pop(draw.randrange(len(blocks)))
        else:
            blocks.append(allocate(int(2 ** draw.uniform(9, 28))))
    draw.shuffle(blocks)
    del blocks[: len(blocks) // 2]
    settle()
    touched = {
        granule
        for address, size in map(_extent, blocks + UNOWNED)
        for granule in range(address // GRANULE_BYTES, (address + size - 1) // GRANULE_BYTES + 1)
    }
    began = time.perf_counter()
    plan = _largest(agent.flush(dry_run=True))
    planned = time.perf_counter() - began
    before = used()
    receipts = agent.flush()
    driver = before - used()
    receipt = _largest(receipts)
    expected, held = plan.expected, plan.before
    assert expected
    assert held
    return {
        "outcome": receipt.outcome,
        "exactness": "exact" if expected.low == expected.high else "interval",
        "low": expected.low,
        "likely": expected.likely,
        "high": expected.high,
        "released": sum(receipt.released_bytes for receipt in receipts),
        "held": held.held_bytes,
        "touched": len(touched) * GRANULE_BYTES,
        "driver": driver,
        "overhead": before - empty - held.held_bytes,
        "plan_seconds": planned,
        "seconds": sum(receipt.duration_seconds for receipt in receipts),
        "receipts": [(r.allocator, r.outcome, r.released_bytes, r.reason) for r in receipts],
    }


def _largest(receipts: Sequence[Receipt]) -> Receipt:
    return max(receipts, key=lambda receipt: receipt.before.held_bytes if receipt.before else 0)


def _extent(block: Any) -> tuple[int, int]:
    """Return address and size of a tensor, of CuPy's pointer, or of RMM's buffer."""
    if hasattr(block, "data_ptr"):
        return block.data_ptr(), block.numel()
    return block.ptr, (block.mem if hasattr(block, "mem") else block).size


def _allocator(name: str) -> tuple[Callable[[int], Any], Callable[[], None]]:
    if name.startswith("torch"):
        import torch

        return lambda size: torch.empty(size, dtype=torch.uint8, device="cuda"), torch.cuda.synchronize
    if name.startswith("cupy"):
        import cupy

        if name.startswith("cupy-async"):
            cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool().malloc)
        if name.endswith("unowned"):
            UNOWNED.append(Block(cupy.cuda.runtime.mallocAsync(1 << 20, 0), 1 << 20))
        return cupy.cuda.alloc, cupy.cuda.Device().synchronize
    import rmm

    counted = rmm.mr.StatisticsResourceAdaptor(rmm.mr.CudaAsyncMemoryResource())
    rmm.mr.set_current_device_resource(counted)
    with suppress(ImportError):
        import cupy  # for a synchronization, if it is available

        return lambda size: rmm.DeviceBuffer(size=size), cupy.cuda.runtime.deviceSynchronize
    return lambda size: rmm.DeviceBuffer(size=size), lambda: None


if __name__ == "__main__":
    main()
