"""Adapter for PaddlePaddle over a fake, on the fake driver."""

from __future__ import annotations

from pathlib import Path

from tests.agent.driver import run

PROGRAM = """
import threading
import paddle
from paddle.base import core
from gpumond.agent import flush, report
from gpumond.agent.allocators import cuda
from gpumond.agent.loaded_allocators import ALLOCATORS
core.COUNTERS[1] = {"Allocated": 40, "Reserved": 64}
"""


def test_counters_of_devices_with_a_context_are_read(library: Path) -> None:
    code = f"""{PROGRAM}
core.COUNTERS[0] = {{"Allocated": 7, "Reserved": 7}}
for pool in report():
    print(pool.allocator, pool.device_uuid[-1], pool.live_bytes, pool.held_bytes, pool.reclaimable)
print(cuda.devices_with_context(), [each.framework() for each in ALLOCATORS.adapters()])
"""
    assert run(code, library, "-c") == [
        "paddle 1 40 64 Reclaimable(low=0, likely=24, high=24, exactness='interval')",
        "[1] ['paddle 3.3.1']",
    ]


def test_flush_that_would_create_a_context_is_refused(library: Path) -> None:
    code = f"{PROGRAM}\nprint(flush()[0].outcome, flush()[0].reason, cuda.devices_with_context(), core.emptied)"
    assert run(code, library, "-c") == [
        "refused Paddle would create a context on each visible device, but at least one has none yet [1] []"
    ]


def test_flush_returns_idle_chunks_in_the_main_thread(library: Path) -> None:
    code = f"""{PROGRAM}
thread = threading.Thread(target=lambda: print(flush()[0].outcome, core.emptied, end=" "))
thread.start(), thread.join()
(receipt,) = flush()
print(receipt.outcome, receipt.released_bytes, receipt.expected.high, core.emptied)
"""
    assert run(code, library, "cc") == ["refused [] freed 24 24 ['MainThread']"]


def test_build_without_cuda_and_process_without_a_context_are_not_read(library: Path) -> None:
    assert run(f"{PROGRAM}\nprint(report(), flush()[0].outcome)", library, "--") == ["() refused"]
    code = f"{PROGRAM}\ncore.compiled_with_cuda = False\nprint(report(), flush(), ALLOCATORS.adapters())"
    assert run(code, library, "cc") == ["() [] []"]
