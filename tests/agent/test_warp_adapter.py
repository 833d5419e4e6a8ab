"""Adapter for Warp over a fake, on the fake driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agent.driver import run

PROGRAM = """
import ctypes
driver = ctypes.CDLL("libcuda.so.1")
def fake(index, reserved, used):
    driver.fake_pool(index, *map(ctypes.c_uint64, (reserved, used, 0)))
import warp
from warp._src import context
from gpumond.agent import flush, report
from gpumond.agent.allocators import cuda
from gpumond.agent.loaded_allocators import ALLOCATORS
def show():
    for pool in report():
        print(pool.allocator, pool.inside, pool.device_uuid[-1], pool.live_bytes, pool.held_bytes, end="; ")
    print(cuda.devices_with_context(), [each.framework() for each in ALLOCATORS.adapters()])
"""


def test_pool_is_read_without_a_call_of_warp(library: Path) -> None:
    code = f"""{PROGRAM}
fake(1, 90, 50)
show()
context.use(1)
show()
"""
    assert run(code, library, "-c") == [
        "mempool None 1 50 90; [1] ['cuda 13.0']",
        "warp mempool 1 50 50; mempool None 1 50 90; [1] ['warp 1.19.0', 'cuda 13.0']",
    ]


@pytest.mark.parametrize(
    "setting", ["is_mempool_enabled = False", "_custom_allocator = object()"], ids=["pool off", "own allocator"]
)
def test_device_whose_pool_warp_does_not_use_is_not_read(library: Path, setting: str) -> None:
    code = f"""{PROGRAM}
fake(0, 90, 50)
context.use(0).{setting}
show()
"""
    assert run(code, library, "c") == ["mempool None 0 50 90; [0] ['warp 1.19.0', 'cuda 13.0']"]


def test_pool_of_the_driver_is_trimmed_and_warp_keeps_nothing(library: Path) -> None:
    code = f"""{PROGRAM}
fake(0, 90, 50)
context.use(0)
for receipt in flush():
    print(receipt.allocator, receipt.outcome, receipt.released_bytes, receipt.steps[0].detail)
"""
    assert run(code, library, "c") == [
        "warp nothing 0 mempool counts and releases its memory",
        "mempool freed 40 ",
    ]


def test_flush_is_refused_during_a_capture_of_warp(library: Path) -> None:
    code = f"""{PROGRAM}
fake(0, 90, 50)
device = context.use(0)
report()
device.captures["stream"] = "graph"
print([(receipt.outcome, receipt.reason) for receipt in flush() if receipt.allocator == "mempool"])
device.captures.clear()
print([receipt.outcome for receipt in flush() if receipt.allocator == "mempool"])
"""
    assert run(code, library, "c") == ["[('refused', 'a CUDA graph is being captured')]", "['freed']"]


def test_forked_child_reads_nothing(library: Path) -> None:
    code = f"""{PROGRAM}
import os
fake(0, 90, 50)
context.use(0)
report()
if os.fork() == 0:
    print(report(), flush=True)
    os._exit(0)
os.wait()
"""
    assert run(code, library, "c") == ["()"]
