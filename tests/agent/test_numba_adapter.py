"""Adapter for Numba over a fake, on the fake driver."""

from __future__ import annotations

from pathlib import Path

from tests.agent.driver import run

PROGRAM = """
import ctypes, threading
driver = ctypes.CDLL("libcuda.so.1")
import numba.cuda
from numba.cuda.cudadrv import devices, driver as numba_driver
from gpumond.agent import flush, report
from gpumond.agent.allocators import cuda
from gpumond.agent.loaded_allocators import ALLOCATORS
MIB = 1 << 20
def show():
    for pool in report():
        print(pool.allocator, pool.device_uuid[-1], pool.live_bytes // MIB, pool.held_bytes // MIB, end=" ")
        print(pool.reclaimable.likely // MIB, pool.reclaimable.exactness)
def elsewhere(call):
    answers = []
    thread = threading.Thread(target=lambda: answers.append(call()))
    thread.start(), thread.join()
    return answers[0]
"""


def test_numba_is_not_read_before_it_has_a_context(library: Path) -> None:
    code = f"""{PROGRAM}
print(report(), flush(), ALLOCATORS.adapters(), numba_driver.driver.is_initialized)
devices.gpus.lst
print(report(), ALLOCATORS.adapters())
"""
    assert run(code, library, "c-") == ["() [] [] False", "initialized () []"]


def test_pending_deallocations_are_the_exact_plan(library: Path) -> None:
    code = f"""{PROGRAM}
manager = devices.use(1)
for handle, size in enumerate((64, 128, 256)):
    manager.allocate(handle, size * MIB)
manager.allocate(7, 32 * MIB, numba_driver.MappedMemory)
print(report()[0].live_allocations)
manager.free(0), manager.free(1), manager.free(7)
show()
(plan,) = flush(dry_run=True)
(receipt,) = flush()
print()
print(plan.expected.low // MIB, plan.expected.exactness, receipt.outcome, receipt.released_bytes // MIB, receipt.raced)
show()
print(cuda.devices_with_context(), driver.fake_retained(), ALLOCATORS.adapters()[0].framework())
"""
    assert run(code, library, "-c") == [
        "initialized 3",
        "numba 1 256 448 192 exact",
        "cuMemFree(0) cuMemFree(1) cuMemFreeHost(7) ",
        "192 exact freed 192 False",
        "numba 1 256 256 0 exact",
        "[1] 0 numba 0.68.1",
    ]


def test_managed_memory_makes_the_plan_an_interval(library: Path) -> None:
    code = f"""{PROGRAM}
manager = devices.use(0)
manager.allocate(0, 64 * MIB), manager.allocate(1, 512 * MIB, numba_driver.ManagedMemory)
manager.free(0)
show()
"""
    assert run(code, library, "c") == ["initialized numba 0 0 64 64 interval", "managed 0 512 512 0 exact"]


def test_managed_arrays_are_reported_apart(library: Path) -> None:
    code = f"""{PROGRAM}
manager = devices.use(1)
manager.allocate(0, 64 * MIB), manager.allocate(1, 512 * MIB, numba_driver.ManagedMemory)
print([(p.allocator, p.live_bytes // MIB, p.managed, p.device_uuid[-1]) for p in report()])
manager.free(1)
print([(p.allocator, p.live_bytes // MIB, p.managed) for p in report()])
"""
    assert run(code, library, "-c") == [
        "initialized [('numba', 64, False, '1'), ('managed', 512, True, '1')]",
        "[('numba', 64, False)]",
    ]


def test_list_is_emptied_in_the_main_thread_only(library: Path) -> None:
    code = f"""{PROGRAM}
from gpumond.agent.flushing import Permissions
from gpumond.facts.messages import FlushCommand
manager = devices.use(0)
manager.allocate(0, 64 * MIB), manager.free(0)
command = FlushCommand("1", "numba", ("cache",))
result = elsewhere(lambda: ALLOCATORS.flush(command, (), Permissions()))
print(result.outcome, result.reason)
(receipt,) = elsewhere(lambda: flush()) or [None]
print(receipt.outcome)
"""
    assert run(code, library, "c") == [
        "initialized refused cache refused: the step is safe in the main thread only: start(main_thread=True) "
        "allows the agent to run it there",
        "refused",
    ]


def test_flush_is_refused_while_numba_defers_or_empties_its_list(library: Path) -> None:
    code = f"""{PROGRAM}
manager = devices.use(0)
manager.allocate(0, 64 * MIB), manager.free(0)
with manager.deallocations.disable():
    print(flush()[0].reason)
manager.deallocations.add_item(lambda _: print(flush()[0].reason), 5, 0)
manager.deallocations.clear()
graph = type("Graph", (), {{}})()
cuda.CAPTURING_GRAPHS.add(graph)
print(flush()[0].reason)
"""
    assert run(code, library, "c") == [
        "initialized the program defers Numba's deallocations (cuda.defer_cleanup)",
        "cuMemFree(0) cache refused: a thread of the program is emptying Numba's list of pending deallocations",
        "a CUDA graph is being captured",
    ]


def test_memory_manager_of_another_library_is_not_read(library: Path) -> None:
    code = f"""{PROGRAM}
class RMMNumbaManager: pass
devices.use(0, RMMNumbaManager())
print(report(), flush())
"""
    assert run(code, library, "c") == ["initialized () []"]


def test_forked_child_reads_nothing(library: Path) -> None:
    code = f"""{PROGRAM}
import os
manager = devices.use(0)
manager.allocate(0, 64 * MIB)
show()
if os.fork() == 0:
    print(report(), flush=True)
    os._exit(0)
os.wait()
"""
    lines = run(code, library, "c")
    assert lines[:1] == ["initialized numba 0 64 64 0 exact"]
    assert "()" in lines
