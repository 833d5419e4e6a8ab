"""Adapter for cuda.core's memory resources over a fake, on the fake driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agent.driver import run

PROGRAM = """
import ctypes, gc, weakref
driver = ctypes.CDLL("libcuda.so.1")
def fake(index, reserved, used, pending=0):
    driver.fake_pool(index, *map(ctypes.c_uint64, (reserved, used, pending)))
from cuda.core import DeviceMemoryResource
from gpumond.agent import flush, report
from gpumond.agent.allocators import cuda
from gpumond.agent.allocators import cuda_core
from gpumond.agent.loaded_allocators import ALLOCATORS
def show():
    for pool in report():
        print(pool.allocator, pool.inside, pool.device_uuid[-1], pool.live_bytes, pool.held_bytes, end="; ")
    print(cuda.devices_with_context(), driver.fake_retained())
fake(16, 90, 50), fake(17, 30, 20), fake(18, 8, 8)
"""


def test_pools_of_resources_are_summed_by_device(library: Path) -> None:
    code = f"""{PROGRAM}
class Own(DeviceMemoryResource): pass
resources = [DeviceMemoryResource(1, 16), Own(1, 17), DeviceMemoryResource(2, 18)]
show()
print(*(pool.reclaimable for pool in report()[:1]), ALLOCATORS.adapters()[0].framework())
"""
    assert run(code, library, "-cc") == [
        "cuda.core None 1 70 120; cuda.core None 2 8 8; [1, 2] 0",
        "Reclaimable(low=0, likely=50, high=50, exactness='interval') cuda.core 1.2.2",
    ]


@pytest.mark.parametrize(
    "resource",
    ["DeviceMemoryResource(0, 0)", "DeviceMemoryResource(0, 16, is_mapped=True)", "DeviceMemoryResource(1, 16)"],
    ids=["default pool", "memory of another process", "no context"],
)
def test_pool_that_is_counted_elsewhere_is_left_out(library: Path, resource: str) -> None:
    code = f"{PROGRAM}fake(0, 70, 60)\nresource = {resource}\nshow()"
    assert run(code, library, "c-") == ["mempool None 0 60 70; [0] 0"]


def test_resource_is_not_kept(library: Path) -> None:
    code = f"""{PROGRAM}
resource = DeviceMemoryResource(0, 16)
show()
kept = weakref.ref(resource)
del resource
print(kept())
show()
"""
    assert run(code, library, "c") == ["cuda.core None 0 50 90; [0] 0", "None", "[0] 0"]


def test_closed_resource_is_left_out(library: Path) -> None:
    code = f"""{PROGRAM}
resources = [DeviceMemoryResource(0, 16), DeviceMemoryResource(0, 17)]
show()
resources[0].close()
show()
"""
    assert run(code, library, "c") == ["cuda.core None 0 70 120; [0] 0", "cuda.core None 0 20 30; [0] 0"]


def test_plan_finds_new_resources_and_reports_search_rarely(library: Path) -> None:
    code = f"""{PROGRAM}
first = DeviceMemoryResource(0, 16)
show()
second = DeviceMemoryResource(0, 17)
show()
(plan,) = flush(dry_run=True)
print(plan.expected.likely)
show()
third = DeviceMemoryResource(0, 18)
cuda_core._next_search_at = 0.0
show()
"""
    assert run(code, library, "c") == [
        "cuda.core None 0 50 90; [0] 0",
        "cuda.core None 0 50 90; [0] 0",
        "50",
        "cuda.core None 0 70 120; [0] 0",
        "cuda.core None 0 78 128; [0] 0",
    ]


def test_searches_for_reports_end_if_they_find_nothing_new(library: Path) -> None:
    code = f"""{PROGRAM}
resources, pauses = [], []
for number in range(8):
    if number in (1, 7):
        resources.append(DeviceMemoryResource(0, 16))
    cuda_core._search()
    pauses.append(int(cuda_core._pause_seconds) if cuda_core._next_search_at < float("inf") else None)
print(pauses)
"""
    assert run(code, library, "c") == ["[10, 5, 10, 20, 40, None, None, 5]"]


def test_flush_trims_each_pool_when_its_device_is_idle(library: Path) -> None:
    code = f"""{PROGRAM}
fake(16, 90, 40, 10)
resources = [DeviceMemoryResource(0, 16), DeviceMemoryResource(1, 17)]
for receipt in flush():
    print(receipt.allocator, receipt.outcome, receipt.released_bytes)
show()
print(driver.fake_synchronized())
"""
    assert run(code, library, "cc") == [
        "cuda.core freed 50",
        "cuda.core freed 10",
        "cuda.core None 0 40 40; cuda.core None 1 20 20; [0, 1] 0",
        "2",
    ]


def test_flush_is_refused_during_a_capture_and_without_a_context(library: Path) -> None:
    code = f"""{PROGRAM}
resource = DeviceMemoryResource(0, 16)
report()
graph = type("Graph", (), {{}})()
cuda.CAPTURING_GRAPHS.add(graph)
print([(receipt.outcome, receipt.reason) for receipt in flush()])
"""
    assert run(code, library, "c") == ["[('refused', 'a CUDA graph is being captured')]"]
    assert run(f"{PROGRAM}\nresource = DeviceMemoryResource(0, 16)\nprint(report(), flush())", library, "-") == [
        "() []"
    ]


def test_version_whose_resources_do_not_keep_their_pool_is_not_read(library: Path) -> None:
    code = f"""
import cuda.core
cuda.core.__version__ = "0.5.1"
{PROGRAM}
resource = DeviceMemoryResource(0, 16)
show()
"""
    assert run(code, library, "c") == ["[0] 0"]


def test_forked_child_reads_nothing(library: Path) -> None:
    code = f"""{PROGRAM}
import os
resource = DeviceMemoryResource(0, 16)
report()
if os.fork() == 0:
    print(report(), flush=True)
    os._exit(0)
os.wait()
"""
    assert run(code, library, "c") == ["()"]
