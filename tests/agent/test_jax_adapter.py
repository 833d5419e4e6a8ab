"""JAX's devices, over fakes for JAX and the driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agent.driver import run

PROGRAM = """
import ctypes, os, jax
from jax._src import xla_bridge
from jax._src.xla_bridge import Client, Device
driver = ctypes.CDLL("libcuda.so.1")
from gpumond.agent import flush, report
from gpumond.agent.allocators import cuda
from gpumond.agent.allocators.jax import adapter
STATS = {"bytes_in_use": 30, "peak_bytes_in_use": 50, "num_allocs": 1}
"""


@pytest.mark.parametrize(
    ("stats", "expected"),
    [
        ('{**STATS, "pool_bytes": 100}', "30 100 True 70 50"),
        ("STATS", "30 30 False 0 50"),
    ],
)
def test_arena_is_not_releasable(library: Path, stats: str, expected: str) -> None:
    code = f"""{PROGRAM}
xla_bridge._backends["cuda"] = Client(Device(1, {stats}), Device(0, STATS))
(pool,) = report()
print(pool.allocator, pool.device_uuid[-1], pool.reclaimable.exactness, pool.inside)
print(pool.live_bytes, pool.held_bytes, pool.held_known, pool.stranded_bytes, pool.peak_live_bytes)
(receipt,) = flush()
print(receipt.outcome, receipt.expected.high, receipt.steps[0].detail)
print(cuda.devices_with_context())
"""
    assert run(code, library, "-c") == [
        "jax 1 not_releasable None",
        expected,
        "nothing 0 jax keeps its memory until the program exits",
        "[1]",
    ]


@pytest.mark.parametrize("backend", ["", "cpu", "cuda"])
def test_jax_is_not_initialized_or_queried_without_a_gpu(library: Path, backend: str) -> None:
    code = f"""{PROGRAM}
class Silent(Device):
    def memory_stats(self):
        raise AssertionError
if {backend!r}:
    xla_bridge._backends[{backend!r}] = Client(Silent(0, None))
print(adapter().read(), cuda.devices_with_context())
"""
    assert run(code, library, "-") == ["() []"]


def test_cpu_device_is_not_reported(library: Path) -> None:
    code = f'{PROGRAM}xla_bridge._backends["cpu"] = Client(Device(0, STATS))\nprint(report())'
    assert run(code, library, "c") == ["()"]


def test_forked_child_does_not_query_jax(library: Path) -> None:
    code = f"""{PROGRAM}
xla_bridge._backends["cuda"] = Client(Device(0, STATS))
print(len(report()), flush=True)
if os.fork() == 0:
    print(len(report()), flush=True)
    os._exit(0)
os.wait()
"""
    assert run(code, library, "c") == ["1", "0"]


def test_error_after_the_end_of_the_backend_states_its_device_and_limit(library: Path) -> None:
    code = f"""{PROGRAM}
from gpumond import agent
xla_bridge._backends["cuda"] = Client(Device(1, {{**STATS, "bytes_limit": 900}}), Device(0, STATS))
report()
xla_bridge._backends.clear()
error = type("JaxRuntimeError", (RuntimeError,), {{"__module__": "jax.errors"}})
try:
    with agent.scope("step"):
        raise error("RESOURCE_EXHAUSTED: Out of memory allocating 1.00GiB with allocator GPU_1_bfc.")
except RuntimeError:
    oom = agent.program().ooms[-1]
    print(oom.device_uuid[-1], oom.allocator, oom.pools, oom.limit_bytes)
"""
    assert run(code, library, "cc") == ["1 jax () 900"]
