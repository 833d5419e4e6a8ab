"""CuPy's adapter and its calls of the driver, over a fake libcuda that records who created a context."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agent.driver import run

PROGRAM = """
import ctypes, cupy
import gpumond.agent
from gpumond.agent.allocators import cuda
pool = cupy.get_default_memory_pool()
"""


def test_driver_is_queried_only_if_the_program_has_loaded_it(library: Path) -> None:
    ask = "print(cuda.device_count(), cuda.has_context(0), cuda.device_uuid(0), cuda.devices_with_context())"
    code = f"import ctypes; from gpumond.agent.allocators import cuda; {ask}; ctypes.CDLL('libcuda.so.1'); {ask}"
    uuid = "GPU-abababab-abab-abab-abab-ababababab00"
    assert run(code, library, "-c") == ["None None None []", f"2 False {uuid} [1]"]


def test_uninitialized_driver_reports_nothing(library: Path) -> None:
    code = "import ctypes; from gpumond.agent.allocators import cuda; ctypes.CDLL('libcuda.so.1'); "
    assert run(code + "print(cuda.device_count(), cuda.devices_with_context(), cuda.device_uuid(0))", library, "") == [
        "None [] None"
    ]


def test_mig_instance_has_its_own_uuid(library: Path) -> None:
    code = "import ctypes; from gpumond.agent.allocators import cuda; ctypes.CDLL('libcuda.so.1'); "
    code += "print(cuda.device_uuid(0))"
    assert run(code, library, "s") == ["MIG-00ababab-abab-abab-abab-ababababab00"]


@pytest.mark.parametrize("chunks", [[5, 30, 7], [0, 30, 7], [5, 0, 0]])
def test_pools_of_devices_with_a_context_are_read(library: Path, chunks: list[int]) -> None:
    code = f"""{PROGRAM}
cupy.cuda.runtime.setDevice(1)
pool.chunks = {{1: {chunks}, 0: [1, 1, 1]}}
(usage,) = gpumond.agent.report()
print(usage.device_uuid[-1], usage.live_bytes, usage.held_bytes, usage.stranded_bytes)
print(usage.reclaimable)
print(cupy.cuda.runtime.getDevice(), cuda.devices_with_context())
"""
    used, whole, split = chunks
    low = whole + split if not used else 0
    exactness = "exact" if low == whole + split else "interval"
    assert run(code, library, "---") == [
        f"1 {used} {used + whole + split} 0",
        f"Reclaimable(low={low}, likely={whole + split}, high={whole + split}, exactness='{exactness}')",
        "1 [1]",
    ]


def test_pool_without_visible_chunks_is_planned_by_its_bounds(library: Path) -> None:
    code = f"""{PROGRAM}
pool.chunks = {{0: [5, 30, 7]}}
(plan,) = gpumond.agent.flush(dry_run=True)
print(plan.outcome, plan.expected)
"""
    assert run(code, library, "c") == ["planned ExpectedRelease(low=0, likely=37, high=37, exactness='interval')"]


def test_context_is_not_created_on_the_unused_current_device_of_a_thread(library: Path) -> None:
    code = f"""{PROGRAM}
pool.chunks = {{2: [5, 30, 7]}}
(receipt,) = gpumond.agent.flush()
print(receipt.outcome, receipt.released_bytes, receipt.steps[0].step)
print(cupy.cuda.runtime.getDevice(), cuda.devices_with_context())
"""
    assert run(code, library, "--c") == ["freed 30 cache", "0 [2]"]


def test_devices_without_a_context_have_no_pools_and_get_no_context(library: Path) -> None:
    code = f"{PROGRAM}\nprint(gpumond.agent.report(), gpumond.agent.flush()[0].reason, cuda.devices_with_context())"
    assert run(code, library, "--") == ["() no device has a live CUDA context []"]


READ = "print([(u.live_bytes, u.held_bytes, u.reclaimable.low, u.reclaimable.likely, u.inside) for u in report()])"


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        ("MemoryPool()", [(5, 25, 20, 20, None)]),
        ("MemoryPool(lambda size: None)", [(5, 5, 0, 0, None)]),
    ],
)
def test_replaced_pool_counts_if_it_is_device_memory(library: Path, use: str, expected: list[object]) -> None:
    code = f"""{PROGRAM}
from gpumond.agent import report
pool.chunks = {{0: [5, 0, 0]}}
other = cupy.cuda.{use}
other.chunks = {{0: [0, 20, 0]}}
cupy.cuda.set_allocator(other.malloc)
{READ}
"""
    (line,) = run(code, library, "c")
    assert line == repr(expected)


def test_managed_pool_is_reported_apart_and_flushed(library: Path) -> None:
    code = f"""{PROGRAM}
from gpumond.agent import flush, report
pool.chunks = {{0: [5, 0, 0]}}
managed = cupy.cuda.MemoryPool(cupy.cuda.malloc_managed)
managed.chunks = {{0: [7, 20, 0]}}
print([(p.allocator, p.live_bytes, p.held_bytes, p.managed) for p in report()])
cupy.cuda.set_allocator(managed.malloc)
print([(p.allocator, p.live_bytes, p.held_bytes, p.managed) for p in report()])
print([(r.allocator, r.outcome, r.released_bytes) for r in flush()])
managed.chunks = {{0: [0, 0, 0]}}
print([p.allocator for p in report()], gpumond.agent.allocators.cuda.devices_with_context())
"""
    assert run(code, library, "c-") == [
        "[('cupy', 5, 5, False)]",
        "[('cupy', 5, 5, False), ('managed', 7, 27, True)]",
        "[('cupy', 'nothing', 0), ('managed', 'freed', 20)]",
        "['cupy'] [0]",
    ]


def test_allocator_of_another_library_is_not_reported_by_cupy(library: Path) -> None:
    code = f"""{PROGRAM}
from gpumond.agent import report
pool.chunks = {{0: [5, 0, 0]}}
cupy.cuda.set_allocator(lambda size: None)
{READ}
"""
    assert run(code, library, "c") == ["[(5, 5, 0, 0, None)]"]


def test_own_stream_ordered_pool_is_trimmed_when_the_device_is_idle(library: Path) -> None:
    code = f"""{PROGRAM}
from gpumond.agent import flush, report
driver = ctypes.CDLL("libcuda.so.1")
driver.fake_pool(*map(ctypes.c_uint64, (17, 70, 30, 10)))
cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool(17).malloc)
{READ}
(receipt,) = flush()
print(receipt.outcome, receipt.released_bytes, receipt.steps[0].step)
"""
    assert run(code, library, "c") == ["[(40, 70, 0, 30, None)]", "freed 40 cache"]


def test_pool_counted_by_another_adapter_is_not_flushed(library: Path) -> None:
    code = f"""{PROGRAM}
from gpumond.agent import flush, report
driver = ctypes.CDLL("libcuda.so.1")
driver.fake_pool(*map(ctypes.c_uint64, (0, 70, 30, 10)))
cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool(0).malloc)
print([pool.allocator for pool in report()])
print([(receipt.allocator, receipt.released_bytes) for receipt in flush()])
"""
    assert run(code, library, "c") == ["['mempool']", "[('cupy', 0), ('mempool', 40)]"]


def test_flush_is_refused_while_one_of_its_streams_is_captured(library: Path) -> None:
    code = f"""{PROGRAM}
from gpumond.agent import flush, report
report()
stream = cupy.cuda.Stream()
stream.begin_capture()
print(flush()[0].reason, stream.end_capture(), flush()[0].reason)
"""
    assert run(code, library, "c") == ["a CUDA graph is being captured graph "]


def test_plans_of_the_main_thread_are_cleared_on_its_device(library: Path) -> None:
    code = f"""{PROGRAM}
import sys, threading
from types import SimpleNamespace
cache = SimpleNamespace(get_curr_size=lambda: 3)
cleared = []
sys.modules["cupy.fft._cache"] = SimpleNamespace(
    get_plan_cache=lambda: cache, clear_plan_cache=lambda: cleared.append(threading.current_thread().name)
)
print([(step.step, step.detail) for step in gpumond.agent.flush(["plans"])[0].steps], cleared, end=" ")
cupy.cuda.runtime.setDevice(1)
thread = threading.Thread(target=lambda: print(gpumond.agent.flush(["plans"])[0].outcome, cleared))
thread.start(), thread.join()
stream = cupy.cuda.Stream()
stream.begin_capture(), stream.end_capture()
print(gpumond.agent.flush(["plans"])[0].reason, cleared)
"""
    assert run(f"{code}", library, "c-")[:1] == ["[('plans', '3 cuFFT plans')] ['MainThread'] refused ['MainThread']"]
    assert run(code, library, "c-")[1].startswith("plans refused: a captured CUDA graph may use a cuFFT plan")


def test_limit_of_a_quota_raises_no_lower_limit_of_the_program(library: Path) -> None:
    code = f"""{PROGRAM}
from gpumond.agent.loaded_allocators import ALLOCATORS, apply_limit
cupy.cuda.runtime.setDevice(1)
pool.chunks = {{1: [5, 30, 7]}}
pool.set_limit(size=100)
for arguments in ((80, None, "team"), (200, None, "team"), (None, None, "team")):
    (applied,) = apply_limit(*arguments)
    print(pool.limits, [(each.limit_bytes, each.quota) for each in ALLOCATORS.limits()])
gpumond.agent.limit(None)
print(pool.limits, ALLOCATORS.limits())
"""
    assert run(code, library, "---") == [
        "{1: 80} [(80, 'team')]",
        "{1: 100} [(100, '')]",
        "{1: 100} [(100, '')]",
        "{1: 100} ()",
    ]


def test_error_of_an_empty_pool_states_its_device_and_limit(library: Path) -> None:
    code = f"""{PROGRAM}
from gpumond import agent
cupy.cuda.runtime.setDevice(1)
pool.set_limit(20 << 20)
error = type("OutOfMemoryError", (MemoryError,), {{"__module__": "cupy.cuda.memory"}})
text = "Out of memory allocating 31,457,280 bytes (allocated so far: 0 bytes, limit set to: 20,971,520 bytes)."
for given in (text, text.replace(", limit", ", at")):
    try:
        with agent.scope("load"):
            raise error(given)
    except MemoryError:
        oom = agent.program().ooms[-1]
        print(oom.device_uuid[-1], oom.request_bytes >> 20, oom.limit_bytes >> 20)
"""
    assert run(code, library, "--") == ["1 30 20", "1 30 20"]
