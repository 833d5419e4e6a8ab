"""The real Numba, if installed: its driver stays uninitialized, and its own list is read and emptied exactly."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.agent_daemon import SECONDS

# numba-cuda replaces numba.cuda for every program of its environment, so the other tests run without it.
pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(importlib.util.find_spec("numba_cuda") is None, reason="needs numba-cuda (pip install)"),
]

PROGRAM = """
import ctypes, threading
library = ctypes.CDLL("libcuda.so.1")
import numba.cuda
from numba.cuda.cudadrv import devices, driver
from gpumond.agent import flush, report
from gpumond.agent.loaded_allocators import ALLOCATORS
MIB = 1 << 20
class Device:
    def __init__(self, ordinal):
        self.id, self.primary_context, self.get_primary_context = ordinal, None, None
def use(ordinal):
    '''Numba's own classes, on a driver that only counts.'''
    driver.driver.is_initialized, driver.driver.initialization_error = True, None
    driver._logger = driver.make_logger()
    driver.driver.get_device_count, driver.driver.get_device = lambda: 2, Device
    freed = []
    driver.driver.cuMemFree = named("cuMemFree", freed.append)
    driver.driver.cuMemFreeHost = named("cuMemFreeHost", lambda handle: None)
    manager = driver.NumbaCUDAMemoryManager(context=None)
    manager.deallocations.memory_capacity = 1 << 40
    context = type("Context", (), {"memory_manager": manager})()
    devices.gpus[ordinal]._device.primary_context = context
    return manager, freed
def named(name, function):
    def call(handle): function(handle)
    call.__name__ = name
    return call
"""


def run(code: str, library: Path, gpus: str) -> list[str]:
    environ = {**os.environ, "LD_LIBRARY_PATH": os.fspath(library), "FAKE_CUDA": gpus}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + code], env=environ, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_driver_is_not_initialized(library: Path) -> None:
    code = """
before = driver.driver.is_initialized
print(report(), flush(), [each.name for each in ALLOCATORS.adapters()], driver.driver.is_initialized == before)
cached = getattr(getattr(vars(type(devices.gpus)).get("lst"), "fget", None), "cache_info", None)
print("lst" in vars(devices.gpus) or bool(cached and cached().currsize))
"""
    assert run(code, library, "c-") == ["() [] [] True", "False"]


def test_pending_bytes_are_exact_and_returned(library: Path) -> None:
    code = """
manager, freed = use(1)
blocks = [driver.AutoFreePointer.__new__(driver.AutoFreePointer) for _ in range(3)]
for number, block in enumerate(blocks):
    block.size = 64 * MIB << number
    manager.allocations[number] = block
def free(number):
    size = manager.allocations.pop(number).size
    manager.deallocations.add_item(driver.driver.cuMemFree, number, size)
free(0), free(2)
manager.deallocations.add_item(driver.driver.cuMemFreeHost, 9, 32 * MIB)
(pool,) = report()
print(pool.allocator, pool.live_bytes // MIB, pool.held_bytes // MIB, pool.reclaimable)
(receipt,) = flush()
print(receipt.outcome, receipt.released_bytes // MIB, freed, manager.deallocations._size, len(manager.deallocations))
print(type(ALLOCATORS.adapters()[0]).__name__, ALLOCATORS.adapters()[0].framework().split()[0])
import os, sys; sys.stdout.flush(); os._exit(0)
"""
    assert run(code, library, "-c") == [
        "numba 128 448 Reclaimable(low=335544320, likely=335544320, high=335544320, exactness='exact')",
        "freed 320 [0, 2] 0 0",
        "NumbaAdapter numba",
    ]


def test_flush_inside_a_method_of_the_list_is_refused(library: Path) -> None:
    code = """
manager, freed = use(1)
manager.deallocations.add_item(lambda _: print(flush()[0].outcome), 0, 0)
manager.deallocations.clear()
import os, sys; sys.stdout.flush(); os._exit(0)
"""
    assert run(code, library, "-c") == ["refused"]
