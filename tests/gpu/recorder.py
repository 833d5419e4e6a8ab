"""Record statistics of PyTorch's allocator on a real device, and the bytes that a flush then returns.

PYTORCH_CUDA_ALLOC_CONF=... python -m tests.gpu.recorder > tests/fixtures/torch-VERSION-BACKEND.json

tests/agent/test_recorded_stats.py applies the adapter's formulas to these records.
"""

from __future__ import annotations

import json
import os
import random
import sys
from typing import Any

import torch

KEPT = ("device", "total_size", "allocated_size", "active_size", "segment_type", "segment_pool_id", "is_expandable")


def main() -> None:
    asynchronous = torch.cuda.get_allocator_backend() == "cudaMallocAsync"
    moments = [moment(seed, asynchronous) for seed in range(4)]
    if not asynchronous:
        moments += [moment(4, asynchronous, graph=True), moment(5, asynchronous, pending=True)]
    recording = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(0),
        "configuration": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        "moments": moments,
    }
    json.dump(recording, sys.stdout, separators=(",", ":"))


def moment(seed: int, asynchronous: bool, graph: bool = False, pending: bool = False) -> dict[str, Any]:
    draw = random.Random(seed)
    captured = _captured() if graph else None
    blocks = [torch.empty(int(2 ** draw.uniform(9, 27)), dtype=torch.uint8, device="cuda") for _ in range(60)]
    draw.shuffle(blocks)
    if pending:
        aside = torch.cuda.Stream()
        with torch.cuda.stream(aside):
            torch.cuda._sleep(2_000_000_000)
        for block in blocks[:10]:
            block.record_stream(aside)
    del blocks[:40]
    if not pending:
        torch.cuda.synchronize()
    record = {
        "stats": plain(torch._C._cuda_memoryStats(0)),
        "snapshot": None if asynchronous else [segment(one) for one in torch.cuda.memory_snapshot()],
    }
    before = torch.cuda.memory_reserved(0)
    torch.cuda.empty_cache()
    record["returned"] = before - torch.cuda.memory_reserved(0)
    del blocks, captured
    torch.cuda.empty_cache()
    return record


def _captured() -> Any:
    graph, x = torch.cuda.CUDAGraph(), torch.ones(1 << 24, device="cuda")
    with torch.cuda.graph(graph):
        y = x * 2
        y = y + 1
    return graph, x, y


def segment(statistics: dict[str, Any]) -> dict[str, Any]:
    blocks = [{"size": block["size"], "state": block["state"]} for block in statistics["blocks"]]
    return {**{key: statistics[key] for key in KEPT if key in statistics}, "blocks": blocks}


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    return value


if __name__ == "__main__":
    main()
