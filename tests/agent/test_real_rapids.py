"""The real RMM and CuPy, if they are installed: both can be imported on a machine without a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from gpumond.commands.run import environment
from tests.helpers.agent_daemon import SECONDS


def needs(library: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(library) is None, reason=f"needs {library} (pip install)")


@needs("rmm")
def test_stack_of_rmms_own_resources_is_read() -> None:
    code = """
import rmm
from gpumond.agent.allocators.rmm import read_resource_stack
mr = rmm.mr
for kind in (mr.StatisticsResourceAdaptor, mr.TrackingResourceAdaptor, lambda up: mr.LimitingResourceAdaptor(up, 9)):
    stack = read_resource_stack(mr.FailureCallbackResourceAdaptor(kind(mr.CudaMemoryResource()), lambda size: False))
    print(stack.live_bytes, stack.is_direct, stack.peak_bytes, stack.peak_count and stack.peak_count.allocations)
print(read_resource_stack(mr.CudaMemoryResource()).live_bytes, read_resource_stack(mr.PinnedHostMemoryResource()))
print(read_resource_stack(mr.StatisticsResourceAdaptor(mr.ManagedMemoryResource())).is_managed)
caching = (mr.PoolMemoryResource, mr.ArenaMemoryResource, mr.FixedSizeMemoryResource, mr.BinningMemoryResource)
print(*(kind.__name__ for kind in caching if issubclass(kind, mr.UpstreamResourceAdaptor)))
print(hasattr(mr.PoolMemoryResource, "pool_size"), hasattr(mr.BinningMemoryResource, "bin_mrs"))
print(hasattr(mr.CudaAsyncViewMemoryResource, "pool_handle"), mr.CudaAsyncMemoryResource.__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "0 True 0 0",
        "0 True None None",
        "0 True None None",
        "None None",
        "True",
        "PoolMemoryResource ArenaMemoryResource FixedSizeMemoryResource BinningMemoryResource",
        "True True",
        "True CudaAsyncMemoryResource",
    ]


@needs("rmm")
def test_resources_that_the_program_sets_are_counted_under_run() -> None:
    code = """
import rmm
from rmm.mr import set_per_device_resource
mr = rmm.mr
default = mr.get_per_device_resource(0)
print(isinstance(default, mr.CudaMemoryResource), isinstance(default, mr.StatisticsResourceAdaptor))
raw = mr.CudaMemoryResource()
set_per_device_resource(1, raw)
first = mr.get_per_device_resource(1)
print(first.get_upstream() is raw, first.allocation_counts.total_count, mr.is_initialized())
set_per_device_resource(1, mr.CudaMemoryResource())
set_per_device_resource(1, raw)
print(mr.get_per_device_resource(1) is first)
own = mr.TrackingResourceAdaptor(raw)
rmm.pylibrmm.memory_resource.set_per_device_resource(2, own)
print(mr.get_per_device_resource(2) is own, rmm.mr.get_log_filenames())
for call in (lambda: mr.set_current_device_resource(5), lambda: rmm.reinitialize(pool=True)):
    try:
        call()
    except TypeError as error:
        print(error)
"""
    environ = environment(os.environ, None, None)
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=SECONDS)
    assert done.stderr == ""
    *lines, resource, argument = done.stdout.splitlines()
    assert lines == ["True True", "True 0 True", "True", "True {0: None, 1: None, 2: None}"]
    assert "incorrect type" in resource
    assert "unexpected keyword argument 'pool'" in argument


@needs("rmm")
@needs("cupy")
def test_allocation_function_of_a_cupy_pool_is_visible() -> None:
    code = """
import cupy
from rmm.allocators.cupy import rmm_cupy_allocator
from gpumond.agent.allocators.cupy import CupyAdapter
adapter = CupyAdapter(cupy)
for allocator in ((), (rmm_cupy_allocator,), (cupy.cuda.malloc_managed,), (lambda size: None,)):
    print(adapter._upstream_allocator(cupy.cuda.MemoryPool(*allocator), 0))
print(adapter._upstream_allocator(cupy.get_default_memory_pool(), 0), hasattr(cupy.cuda.MemoryAsyncPool, "_pools"))
from gpumond.agent.allocators.cupy import managed_pool
for function in (None, cupy.cuda.malloc_managed):
    pool = cupy.cuda.MemoryPool(*filter(None, [function]))
    cupy.cuda.set_allocator(pool.malloc)
    print(managed_pool(cupy) is pool)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["", "rmm", "None", "None", " True", "False", "True"]


@needs("rmm")
@needs("cupy")
def test_adapters_import_nothing_and_report_nothing_without_a_context() -> None:
    code = """
import sys, cupy, rmm
before = set(sys.modules)
import gpumond.agent
receipts = gpumond.agent.flush(steps=["spill", "cache", "trim"])
print([(receipt.allocator, receipt.outcome) for receipt in receipts], gpumond.agent.report())
print([name for name in set(sys.modules) - before if name.startswith(("cupy", "rmm", "cuda", "numpy"))])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["[('cupy', 'refused'), ('rmm', 'refused')] ()", "[]"]
