"""Driver behavior that adapters rely on, on a real device: pools, handles, contexts, forks."""

from __future__ import annotations

import ctypes.util
import importlib.util

import pytest

from tests.gpu.adapter_programs import run

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _needs_a_device() -> None:
    try:
        if ctypes.CDLL("libcuda.so.1").cuInit(0):
            pytest.skip("needs an NVIDIA device")
    except OSError:
        pytest.skip("needs an NVIDIA device")


def has(library: str) -> bool:
    try:
        return importlib.util.find_spec(library) is not None
    except ModuleNotFoundError:  # nor its parent
        return False


def test_queries_of_pools_and_contexts_create_none() -> None:
    code = "print(contexts(), cuda.default_pool(0) is not None, report(), cuda.trim_mempool(0, 0), contexts())"
    assert run(code) == ["[] True () False []"]


def test_default_pool_is_read_and_trimmed_from_a_thread_without_a_context() -> None:
    code = """
use(0)
keep(ctypes.c_void_p(cuda.default_pool(0)))
kept, freed = allocate(64), allocate(256)
ask("cuMemFreeAsync", freed, None)
(pool,) = elsewhere(report)
(receipt,) = elsewhere(flush)
print(pool.allocator, pool.live_bytes >= 64 * MIB, pool.held_bytes >= 320 * MIB, pool.reclaimable.exactness)
print(receipt.outcome, 224 * MIB <= receipt.released_bytes <= receipt.expected.high + 256 * MIB, contexts())
"""
    assert run(code) == ["mempool True True interval", "freed True [0]"]


def test_pool_of_an_allocation_can_be_queried() -> None:
    code = """
device = use(0)
class Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]
class Properties(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int), ("handles", ctypes.c_int), ("location", Location), ("rest", ctypes.c_char * 80)]
properties, pool = Properties(1, 0, Location(1, 0)), ctypes.c_void_p()
ask("cuMemPoolCreate", ctypes.byref(pool), ctypes.byref(properties))
plain = ctypes.c_uint64()
ask("cuMemAlloc_v2", ctypes.byref(plain), ctypes.c_size_t(MIB))
print(cuda.mempool_of(allocate(1, pool).value) == pool.value, end=" ")
print(cuda.mempool_of(allocate(1).value) == cuda.default_pool(0))
print(cuda.mempool_of(plain.value))
"""
    assert run(code) == ["True True", "None"]


def test_forked_child_gets_an_error_from_the_driver() -> None:
    code = """
use(0)
if os.fork() == 0:
    count = ctypes.c_int()
    print(driver.cuDeviceGetCount(ctypes.byref(count)), contexts(), flush=True)
    os._exit(0)
os.wait()
"""
    assert run(code) == ["3 []"]


@pytest.mark.skipif(importlib.util.find_spec("rmm") is None, reason="needs RMM")
def test_hidden_pool_of_rmm_is_found_and_trimmed() -> None:
    code = """
import rmm
mr = rmm.mr.StatisticsResourceAdaptor(rmm.mr.CudaAsyncMemoryResource(initial_pool_size=0))
rmm.mr.set_per_device_resource(0, mr)
kept, freed = mr.allocate(64 * MIB), mr.allocate(256 * MIB)
mr.deallocate(freed, 256 * MIB)
(before,) = elsewhere(report)
(plan,), (receipt,) = elsewhere(lambda: (flush(dry_run=True), flush()))
print(before.live_bytes == 64 * MIB, before.held_known)
print(plan.before.held_bytes >= 320 * MIB, receipt.outcome, receipt.released_bytes >= 224 * MIB)
print(receipt.expected.low <= receipt.released_bytes <= receipt.expected.high, contexts())
"""
    assert run(code) == ["True False", "True freed True", "True [0]"]


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs JAX")
@pytest.mark.parametrize("allocator", ["default", "cuda_async"])
def test_jax_reports_bytes_in_use(allocator: str) -> None:
    code = f"""
os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] = {allocator!r}
os.environ["XLA_CLIENT_MEM_FRACTION"] = "0.1"
import jax
x = jax.numpy.ones((64, MIB // 4), dtype="float32").block_until_ready()
for pool in report():
    print(pool.allocator, pool.live_bytes // MIB, pool.held_bytes // MIB, pool.held_known, pool.inside)
"""
    assert run(code)[0].startswith("jax 64 ")


@pytest.mark.skipif(importlib.util.find_spec("numba_cuda") is None, reason="needs numba-cuda")
def test_pending_deallocations_of_numba_are_what_the_driver_returns() -> None:
    code = """
import numba.cuda
def used():
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    ask("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return total.value - free.value
print(report(), contexts(), end=" ")
kept = numba.cuda.device_array(128 * MIB, dtype="uint8")
arrays = [numba.cuda.device_array(64 * MIB, dtype="uint8") for _ in range(9)]
arrays.clear()
before = used()
(pool,) = elsewhere(report)
(plan,) = elsewhere(lambda: flush(dry_run=True))
(refused,) = elsewhere(flush)
(receipt,) = flush()
print(pool.live_bytes // MIB, plan.expected.low // MIB, plan.expected.exactness, refused.outcome)
print(receipt.outcome, receipt.released_bytes // MIB, (before - used()) // MIB, contexts())
"""
    assert run(code) == ["() [] 128 576 exact refused", "freed 576 576 [0]"]


@pytest.mark.skipif(not has("cuda.core"), reason="needs cuda.core")
def test_own_pool_of_cuda_core_is_found_and_trimmed() -> None:
    code = """
from cuda.core import Device, DeviceMemoryResource, DeviceMemoryResourceOptions
print(report(), contexts(), end=" ")
device = Device(0)
device.set_current()
stream = device.default_stream
own, shared = DeviceMemoryResource(device, DeviceMemoryResourceOptions()), DeviceMemoryResource(device)
keep(ctypes.c_void_p(int(own.handle)))  # otherwise the driver returns free memory at each synchronization
kept, freed = own.allocate(64 * MIB, stream=stream), own.allocate(256 * MIB, stream=stream)
other = shared.allocate(32 * MIB, stream=stream)
freed.close(stream)
stream.sync()
before, shared_pool = elsewhere(report)
(plan, _), (receipt, _) = elsewhere(lambda: (flush(dry_run=True), flush()))
print(before.allocator, before.live_bytes // MIB, before.held_bytes >= 320 * MIB, shared_pool.allocator)
print(receipt.outcome, receipt.released_bytes >= 224 * MIB, receipt.released_bytes <= plan.expected.high, receipt.raced)
own.close()
print([pool.allocator for pool in elsewhere(report)], contexts())
"""
    assert run(code) == ["() [] cuda.core 64 True mempool", "freed True True False", "['mempool'] [0]"]


@pytest.mark.skipif(not has("warp"), reason="needs Warp")
def test_warp_is_read_in_its_pool_and_its_capture_refuses_a_flush() -> None:
    code = """
import warp
unused = report(), contexts(), warp._src.context.runtime
array = warp.zeros(64 * MIB, dtype=warp.uint8, device="cuda:0")
warp.synchronize()
pools = elsewhere(report)
print(*unused, [(pool.allocator, pool.inside) for pool in pools], len({pool.live_bytes for pool in pools}))
print(pools[0].live_bytes == warp.get_mempool_used_mem_current("cuda:0") >= 64 * MIB, end=" ")
with warp.ScopedCapture(device="cuda:0") as capture:
    array.zero_()
    refused = elsewhere(flush)[-1]
warp.capture_launch(capture.graph)
warp.synchronize()
print(refused.allocator, refused.outcome, refused.reason, elsewhere(flush)[-1].outcome in ("freed", "nothing"))
"""
    assert run(code)[-2:] == [  # after Warp's greeting
        "() [] None [('warp', 'mempool'), ('mempool', None)] 1",
        "True mempool refused a CUDA graph is being captured True",
    ]
