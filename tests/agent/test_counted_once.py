"""Libraries that allocate from each other, or share a pool of the driver: every byte is counted once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agent.driver import run

PROGRAM = """
import ctypes
driver = ctypes.CDLL("libcuda.so.1")
driver.fake_choose()
def fake(index, reserved, used):
    driver.fake_pool(index, *map(ctypes.c_uint64, (reserved, used, 0)))
def torch_holds(held, live, backend):
    import torch
    from torch.world import ACTIVE, FREE, Segment
    torch.WORLD.reset(segments=[Segment([(live, ACTIVE), (held - live, FREE)])], backend=backend)
def tensorflow_holds(live):
    import tensorflow
    tensorflow.context.context().initialize(1, {"/device:GPU:0": (live, live)})
def jax_holds(live, **stats):
    from jax._src import xla_bridge
    xla_bridge._backends["cuda"] = xla_bridge.Client(xla_bridge.Device(0, {"bytes_in_use": live, **stats}))
def rmm_holds(live, below):
    import rmm
    mr = rmm.mr.StatisticsResourceAdaptor(below(rmm.mr))
    rmm.mr.set_per_device_resource(0, mr)
    mr.allocate(live)
def warp_uses(ordinal):
    import warp
    warp._src.context.use(ordinal)
def cupy_holds(live, free, allocator):
    import cupy
    pool = cupy.cuda.MemoryPool(allocator)
    pool.chunks = {0: [live, free, 0]}
    cupy.cuda.set_allocator(pool.malloc)
"""
SHOW = """
from gpumond.agent import report
from gpumond.tick.ledger import outermost_pools
pools = report()
print(*(f"{p.allocator}/{p.inside}" for p in pools))
print(sum(p.held_bytes for p in outermost_pools(pools)))
"""
ASYNC = {"TF_GPU_ALLOCATOR": "cuda_malloc_async", "XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async"}
PLAIN = "lambda mr: mr.CudaMemoryResource()"
DEFAULT_POOL = "lambda mr: mr.CudaAsyncViewMemoryResource(0)"


@pytest.mark.parametrize(
    ("program", "expected", "held"),
    [
        pytest.param("fake(0, 90, 50); torch_holds(90, 50, 'cudaMallocAsync')", "torch/None", 90, id="torch async"),
        pytest.param(
            "fake(0, 90, 50); torch_holds(70, 50, 'native')", "torch/None mempool/None", 160, id="torch native"
        ),
        pytest.param(
            "fake(0, 90, 50); import cupy; cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool(0).malloc)",
            "mempool/None",
            90,
            id="CuPy async",
        ),
        pytest.param(
            "fake(0, 90, 50); fake(17, 30, 20); import cupy\n"
            "cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool(17).malloc)",
            "cupy/None mempool/None",
            120,
            id="CuPy async, another pool",
        ),
        pytest.param(
            "fake(0, 90, 50); tensorflow_holds(40)", "tensorflow/mempool mempool/None", 90, id="TensorFlow async"
        ),
        pytest.param("fake(0, 90, 50); jax_holds(40)", "jax/mempool mempool/None", 90, id="JAX async"),
        pytest.param(
            "fake(0, 90, 50); jax_holds(400)", "jax/None mempool/None", 490, id="JAX async, in a pool of its own"
        ),
        pytest.param(
            "fake(0, 90, 50); torch_holds(90, 50, 'cudaMallocAsync'); tensorflow_holds(10); jax_holds(10)",
            "torch/None tensorflow/torch jax/torch",
            90,
            id="torch, TensorFlow and JAX async",
        ),
        pytest.param(
            f"fake(0, 90, 50); rmm_holds(40, {DEFAULT_POOL})",
            "rmm/mempool mempool/None",
            90,
            id="RMM on the default pool",
        ),
        pytest.param("fake(0, 90, 50); warp_uses(0)", "warp/mempool mempool/None", 90, id="Warp"),
        pytest.param(
            "fake(0, 90, 50); torch_holds(90, 50, 'cudaMallocAsync'); warp_uses(0)",
            "torch/None warp/torch",
            90,
            id="torch async and Warp",
        ),
        pytest.param(
            "fake(0, 90, 50); fake(17, 30, 20); from cuda.core import DeviceMemoryResource\n"
            "resources = [DeviceMemoryResource(0, pool) for pool in (0, 17)]",
            "cuda.core/None mempool/None",
            120,
            id="cuda.core, on the default pool and in a pool of its own",
        ),
        pytest.param(
            "fake(17, 30, 20); from cuda.core import DeviceMemoryResource\n"
            "resource = DeviceMemoryResource(0, 17); import cupy, gpumond.agent; gpumond.agent.report()\n"
            "cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool(17).malloc)\n"
            "rmm_holds(10, lambda mr: mr.CudaAsyncViewMemoryResource(17))",
            "rmm/cuda.core cuda.core/None",
            30,
            id="CuPy and RMM on a pool of cuda.core",
        ),
        pytest.param(
            f"torch_holds(70, 50, 'pluggable'); rmm_holds(70, {PLAIN})", "rmm/None", 70, id="torch on RMM, pluggable"
        ),
        pytest.param(
            f"rmm_holds(70, {PLAIN}); from rmm.allocators.cupy import rmm_cupy_allocator\n"
            "cupy_holds(20, 10, rmm_cupy_allocator)",
            "cupy/rmm rmm/None",
            70,
            id="CuPy pool on RMM",
        ),
        pytest.param(
            f"rmm_holds(70, {PLAIN}); from rmm.allocators.cupy import rmm_cupy_allocator\n"
            "import cupy; cupy.cuda.set_allocator(rmm_cupy_allocator)",
            "rmm/None",
            70,
            id="CuPy on RMM",
        ),
        pytest.param(
            f"rmm_holds(30, {PLAIN}); import cudf; from cudf.core.buffer import spill_manager as s\n"
            "s.set_global_manager(s.SpillManager()); buffer = s.Buffer(40)",
            "cudf/rmm rmm/None",
            70,
            id="cuDF on RMM",
        ),
    ],
)
def test_bytes_of_shared_pools_are_counted_once(library: Path, program: str, expected: str, held: int) -> None:
    assert run(f"{PROGRAM}{program}{SHOW}", library, "c", **ASYNC) == [expected, str(held)]


def test_best_fit_arena_is_inside_no_pool(library: Path) -> None:
    code = f"{PROGRAM}fake(0, 90, 50); tensorflow_holds(40); jax_holds(30, pool_bytes=60){SHOW}"
    assert run(code, library, "c") == ["tensorflow/None jax/None mempool/None", "190"]


def test_allocators_are_flushed_before_the_libraries_they_use(library: Path) -> None:
    """The order of imports does not matter."""
    code = f"""{PROGRAM}
from gpumond.agent import report
rmm_holds(30, {PLAIN})
report()
import cudf; from cudf.core.buffer import spill_manager as s
s.set_global_manager(s.SpillManager()); buffer = s.Buffer(40){SHOW}
"""
    assert run(code, library, "c") == ["cudf/rmm rmm/None", "70"]
