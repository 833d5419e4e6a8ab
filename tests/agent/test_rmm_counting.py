"""Live bytes of RMM in a program that runs under `gpumond run`, over fakes for RMM and the driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpumond.commands.run import INJECT_DIRECTORY
from tests.agent.driver import SHOW, run as run_program
from tests.helpers.agent_daemon import FAKES

PROGRAM = """
import ctypes, rmm
driver = ctypes.CDLL("libcuda.so.1")
driver.fake_choose()
from rmm.mr import *
from gpumond.agent import flush, report
"""


def run(code: str, library: Path, gpus: str = "c", **values: str) -> list[str]:
    return run_program(
        PROGRAM + code, library, gpus, GPUMOND_AGENT="1", PYTHONPATH=f"{INJECT_DIRECTORY}:{FAKES}", **values
    )


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("rmm.reinitialize(pool_allocator=True, initial_pool_size=100)", "0 50 100 0 not_releasable 50"),
        ("rmm.reinitialize()", "0 50 50 0 exact 0"),
        ("rmm.reinitialize(managed_memory=True)", "0 50 50 0 exact 0"),
        ("set_current_device_resource(PoolMemoryResource(CudaMemoryResource(), 100))", "0 50 100 0 not_releasable 50"),
        (
            "rmm.mr.set_per_device_resource(0, ArenaMemoryResource(CudaMemoryResource()))",
            "0 50 None 0 not_releasable 0",
        ),
        ("pass", "0 50 50 0 exact 0"),
    ],
)
def test_live_bytes_are_counted_from_the_first_allocation(library: Path, setting: str, expected: str) -> None:
    code = f"""
{setting}
mr = get_per_device_resource(0)
mr.allocate(50), mr.deallocate(mr.allocate(30), 30)
{SHOW}
"""
    assert run(code, library) == [expected]


def test_every_device_is_counted(library: Path) -> None:
    code = f"""
rmm.reinitialize(pool_allocator=True, initial_pool_size=100, devices=[0, 1])
get_per_device_resource(1).allocate(7){SHOW}
rmm.mr.set_per_device_resource(1, PoolMemoryResource(CudaMemoryResource(), 60))
get_per_device_resource(1).allocate(9){SHOW}
"""
    assert run(code, library, "cc") == [
        "0 0 100 0 not_releasable 100",
        "1 7 100 0 not_releasable 93",
        "0 0 100 0 not_releasable 100",
        "1 9 60 0 not_releasable 51",
    ]


def test_hidden_pool_of_the_driver_is_found_once_the_program_has_allocated(library: Path) -> None:
    code = f"""
mr = CudaAsyncMemoryResource()
set_current_device_resource(mr)
{SHOW}
get_per_device_resource(0).allocate(50){SHOW}
print(get_per_device_resource(0).allocation_counts.total_count)
"""
    assert run(code, library) == ["0 0 None 0 interval 0", "0 50 306 0 interval 256", "1"]


def test_replaced_resource_is_released_at_once(library: Path) -> None:
    code = """
class RecordedResource(CudaAsyncMemoryResource):
    def __del__(self):
        super().__del__()
        print("gone", flush=True)
set_current_device_resource(RecordedResource())
get_per_device_resource(0).allocate(50), report()
set_current_device_resource(CudaMemoryResource())
print("replaced", flush=True)
set_current_device_resource(RecordedResource())
get_per_device_resource(0).allocate(50), report()
rmm.reinitialize()
print("reset")
"""
    assert run(code, library) == ["gone", "replaced", "gone", "reset"]


def test_program_sees_the_resource_that_it_has_set(library: Path) -> None:
    code = f"""
pool = PoolMemoryResource(CudaMemoryResource(), 100)
set_current_device_resource(pool)
current = get_per_device_resource(0)
print(current.pool_size(), isinstance(current, PoolMemoryResource), isinstance(current, StatisticsResourceAdaptor))
print(current.upstream_mr is pool, isinstance(current, ArenaMemoryResource), hasattr(current, "missing"))
current.allocate(50)
set_current_device_resource(CudaMemoryResource())
set_current_device_resource(current)
print(get_per_device_resource(0) is current)
set_current_device_resource(pool)
print(get_per_device_resource(0) is current){SHOW}
"""
    assert run(code, library) == [
        "100 True True",
        "True False False",
        "True",
        "True",
        "0 50 100 0 not_releasable 50",
    ]


@pytest.mark.parametrize(
    "resource",
    [
        "StatisticsResourceAdaptor(PoolMemoryResource(CudaMemoryResource(), 100))",
        "LimitingResourceAdaptor(CudaMemoryResource())",
        "LoggingResourceAdaptor(CudaMemoryResource())",
        "DeviceMemoryResource()",
    ],
)
def test_other_stacks_are_left_alone(library: Path, resource: str) -> None:
    code = f"mr = {resource}\nset_current_device_resource(mr)\nprint(get_per_device_resource(0) is mr)"
    assert run(code, library) == ["True"]


def test_error_of_the_program_is_that_of_rmm(library: Path) -> None:
    code = """
for call in (lambda: set_current_device_resource(5), lambda: rmm.reinitialize(pool=True)):
    try:
        call()
    except TypeError as error:
        print(error)
"""
    assert run(code, library) == [
        "expected DeviceMemoryResource, got int",
        "reinitialize() got an unexpected keyword argument 'pool'",
    ]


def test_setting_a_resource_while_the_agent_imports_its_adapter_is_no_error(library: Path) -> None:
    code = """
import sys, types
sys.modules["gpumond.agent.allocators.rmm"] = types.ModuleType("gpumond.agent.allocators.rmm")  # as far as it has come
set_current_device_resource(PoolMemoryResource(CudaMemoryResource(), 100))
rmm.reinitialize(pool_allocator=True, initial_pool_size=60)
print(get_per_device_resource(0).pool_size())
"""
    assert run(code, library) == ["60"]


def test_program_can_keep_its_resources(library: Path) -> None:
    code = f"""
pool = PoolMemoryResource(CudaMemoryResource(), 100)
set_current_device_resource(pool)
print(get_per_device_resource(0) is pool){SHOW}
"""
    assert run(code, library, GPUMOND_COUNT_RMM="0") == ["True", "0 None 100 0 not_releasable 0"]


def test_resource_that_was_set_before_the_agent_came_is_left_alone(library: Path) -> None:
    code = f"""
pool = PoolMemoryResource(CudaMemoryResource(), 100)
set_current_device_resource(pool)
import gpumond.agent
gpumond.agent.start()
print(get_per_device_resource(0) is pool){SHOW}
"""
    environ = {"PYTHONPATH": f"{FAKES}"}
    assert run_program(PROGRAM + code, library, "c", **environ) == ["True", "0 None 100 0 not_releasable 0"]


FAILING = """
class FullResource(CudaMemoryResource):
    failures = 1
    def allocate(self, nbytes):
        if FullResource.failures:
            FullResource.failures -= 1
            raise MemoryError("std::bad_alloc: out_of_memory")
        return super().allocate(nbytes)
set_current_device_resource(FullResource())
from gpumond.agent.allocators.borrowing import BORROWING
from gpumond.facts.messages import BorrowResponse
asked = []
BORROWING.request = lambda device, size: asked.append(size) or ANSWER
def attempt():
    try:
        get_per_device_resource(0).allocate(50)
        print("allocated", asked)
    except MemoryError:
        print("failed", asked)
attempt()
print(isinstance(get_per_device_resource(0), FullResource))
"""


@pytest.mark.parametrize(
    ("answer", "result"),
    [
        ("BorrowResponse('1', True, 50)", "allocated [50]"),
        ("Borrowed('1', False)", "failed [50]"),
        ("None", "failed [50]"),
    ],
)
def test_a_failed_allocation_asks_the_daemon_and_is_repeated_if_it_released_memory(
    library: Path, answer: str, result: str
) -> None:
    assert run(FAILING.replace("ANSWER", answer), library, GPUMOND_BORROW="1") == [result, "True"]


def test_without_borrow_a_failed_allocation_fails(library: Path) -> None:
    assert run(FAILING.replace("ANSWER", "None"), library) == ["failed []", "True"]
