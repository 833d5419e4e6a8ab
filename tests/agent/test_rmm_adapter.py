"""RMM's stacks of memory resources, over fakes for RMM and the driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agent.driver import SHOW, run

PROGRAM = """
import ctypes, os, rmm, threading
from rmm.mr import *
driver = ctypes.CDLL("libcuda.so.1")
driver.fake_choose()
def fake(index, reserved, used, pending=0):
    driver.fake_pool(index, *map(ctypes.c_uint64, (reserved, used, pending)))
import gpumond.agent
from gpumond.agent import flush, report
from gpumond.agent.allocators import cuda
"""


def counted(by: str, below: str) -> str:
    return f"""
mr = {by}({below})
rmm.mr.set_per_device_resource(0, mr)
mr.allocate(50), mr.deallocate(mr.allocate(30), 30)
"""


@pytest.mark.parametrize("by", ["StatisticsResourceAdaptor", "TrackingResourceAdaptor", "LimitingResourceAdaptor"])
@pytest.mark.parametrize(
    ("below", "expected"),
    [
        ("CudaMemoryResource()", "0 50 50 0 exact 0"),
        ("LoggingResourceAdaptor(CudaMemoryResource())", "0 50 50 0 exact 0"),
        ("PoolMemoryResource(CudaMemoryResource(), 100)", "0 50 100 0 not_releasable 50"),
        ("BinningMemoryResource(PoolMemoryResource(CudaMemoryResource(), 100))", "0 50 100 0 not_releasable 50"),
        ("ArenaMemoryResource(CudaMemoryResource())", "0 50 None 0 not_releasable 0"),
        ("CudaAsyncMemoryResource()", "0 50 None 0 interval 0"),
    ],
)
def test_bytes_counted_by_an_adaptor_are_live(library: Path, by: str, below: str, expected: str) -> None:
    assert run(f"{PROGRAM}{counted(by, below)}{SHOW}", library, "c-") == [expected]


@pytest.mark.parametrize(("by", "expected"), [("StatisticsResourceAdaptor", "1"), ("TrackingResourceAdaptor", "None")])
def test_number_of_live_allocations_is_that_of_the_adaptor(library: Path, by: str, expected: str) -> None:
    below = "PoolMemoryResource(StatisticsResourceAdaptor(CudaMemoryResource()), 100)"
    code = f"{PROGRAM}{counted(by, below)}print(report()[0].live_allocations)"
    assert run(code, library, "c") == [expected]


@pytest.mark.parametrize(
    ("resource", "expected"),
    [
        ("PoolMemoryResource(CudaMemoryResource(), 100)", "0 None 100 0 not_releasable 0"),
        ("BinningMemoryResource(PoolMemoryResource(CudaMemoryResource(), 100))", "0 None 100 0 not_releasable 0"),
        ("ArenaMemoryResource(TrackingResourceAdaptor(CudaMemoryResource()))", "0 None 70 0 not_releasable 0"),
        ("ArenaMemoryResource(CudaMemoryResource())", "0 None None 0 not_releasable 0"),
        ("CudaAsyncMemoryResource()", "0 None None 0 interval 0"),
        ("PoolMemoryResource(CudaAsyncViewMemoryResource(17), 100)", "0 None 164 64 interval 0"),
    ],
)
def test_live_bytes_of_a_pool_without_a_count_are_unknown(library: Path, resource: str, expected: str) -> None:
    code = f"""{PROGRAM}
fake(17, 164, 0, 0)
mr = {resource}
rmm.mr.set_per_device_resource(0, mr)
mr.allocate(70){SHOW}
print(rmm.mr.get_per_device_resource(0) is mr)
"""
    assert run(code, library, "c") == [expected, "True"]


@pytest.mark.parametrize("resource", ["CudaMemoryResource()", "ManagedMemoryResource()", "DeviceMemoryResource()"])
def test_plain_resource_without_a_count_is_not_reported(library: Path, resource: str) -> None:
    code = f"{PROGRAM}rmm.mr.set_per_device_resource(0, {resource})\nprint(report())"
    assert run(code, library, "c") == ["()"]


@pytest.mark.parametrize(
    ("below", "expected"),
    [
        ("ManagedMemoryResource()", "0 50 50 0 exact 0"),
        ("PoolMemoryResource(ManagedMemoryResource(), 100)", "0 50 100 0 not_releasable 50"),
    ],
)
def test_managed_memory_is_marked(library: Path, below: str, expected: str) -> None:
    code = f"{PROGRAM}{counted('StatisticsResourceAdaptor', below)}{SHOW}print(report()[0].managed)"
    assert run(code, library, "c") == [expected, "True"]
    code = f"{PROGRAM}{counted('StatisticsResourceAdaptor', 'CudaMemoryResource()')}print(report()[0].managed)"
    assert run(code, library, "c") == ["False"]


def test_flush_of_a_pool_without_a_count_promises_and_returns_nothing(library: Path) -> None:
    code = f"""{PROGRAM}
rmm.mr.set_per_device_resource(0, PoolMemoryResource(CudaMemoryResource(), 100))
(plan,), (receipt,) = flush(dry_run=True), flush()
print(plan.before.live_bytes, plan.before.held_bytes, plan.expected.high, receipt.outcome, receipt.released_bytes)
"""
    assert run(code, library, "c") == ["None 100 0 nothing 0"]


def test_adaptor_below_a_pool_counts_what_the_pool_holds(library: Path) -> None:
    below = "ArenaMemoryResource(TrackingResourceAdaptor(CudaMemoryResource()))"
    code = f"{PROGRAM}{counted('StatisticsResourceAdaptor', below)}mr.upstream_mr.upstream_mr.allocate(20){SHOW}"
    assert run(code, library, "c") == ["0 50 70 0 not_releasable 20"]


def test_bins_of_other_resources_make_held_bytes_unknown(library: Path) -> None:
    code = f"""{PROGRAM}
bins = BinningMemoryResource(PoolMemoryResource(CudaMemoryResource(), 100))
bins.add_bin(8)
{counted("StatisticsResourceAdaptor", "bins")}{SHOW}
bins.add_bin(8, PoolMemoryResource(CudaMemoryResource(), 100)){SHOW}
"""
    assert run(code, library, "c") == ["0 50 100 0 not_releasable 50", "0 50 None 0 not_releasable 0"]


def test_count_that_was_reset_is_ignored(library: Path) -> None:
    code = f"""{PROGRAM}{counted("StatisticsResourceAdaptor", "CudaMemoryResource()")}{SHOW}
mr.push_counters()
mr.allocate(5){SHOW}
mr.pop_counters(){SHOW}
print(rmm.mr.get_per_device_resource(0) is mr)
"""
    assert run(code, library, "c") == ["0 50 50 0 exact 0", "0 55 55 0 exact 0", "True"]


def test_driver_pool_with_a_handle_needs_no_adaptor(library: Path) -> None:
    code = f"""{PROGRAM}
rmm.mr.set_per_device_resource(0, CudaAsyncViewMemoryResource(17))
fake(17, 64, 40, 8){SHOW}
(receipt,) = flush()
print(receipt.outcome, receipt.expected.likely, receipt.released_bytes, receipt.steps[0].step)
"""
    assert run(code, library, "c") == ["0 48 64 16 interval 0", "freed 16 24 trim"]


def in_another_thread(code: str) -> str:
    """Run the code in a thread without a current device, like the agent's."""
    indented = "".join(f"    {line}\n" for line in code.strip().splitlines())
    return f"\ndef thread():\n{indented}started = threading.Thread(target=thread)\nstarted.start(), started.join()\n"


def test_flush_learns_the_handle_of_a_hidden_pool_and_trims_it(library: Path) -> None:
    flush = in_another_thread("""
(plan,), (receipt,) = flush(dry_run=True), flush()
print(plan.before.held_bytes, plan.expected.high, receipt.outcome, receipt.released_bytes, receipt.after.held_bytes)
print(mr.allocation_counts.total_count, cuda.devices_with_context(), driver.fake_retained())
""")
    code = f"""{PROGRAM}{counted("StatisticsResourceAdaptor", "CudaAsyncMemoryResource()")}{SHOW}{flush}"""
    # Device 0 has no context, and gets none.
    assert run(code.replace("resource(0", "resource(1"), library, "-c") == [
        "1 50 None 0 interval 0",
        "336 286 freed 542 50",
        "2 [1] 0",
    ]


def test_lifetime_of_a_resource_is_not_extended(library: Path) -> None:
    """The same holds if the program drops it during a flush: the agent then ends it, on its device."""
    other = "StatisticsResourceAdaptor(CudaMemoryResource())"
    flush = in_another_thread("flush(steps=['hooks', 'trim'])")
    code = f"""{PROGRAM}{counted("StatisticsResourceAdaptor", "CudaAsyncMemoryResource()")}
class RecordedResource(CudaAsyncMemoryResource):
    def __del__(self):
        super().__del__()
        print("gone", flush=True)
@gpumond.agent.on_flush
def replace():
    print("replaced", flush=True)
    rmm.mr.set_per_device_resource(1, {other})
def use(resource):
    rmm.mr.set_per_device_resource(1, StatisticsResourceAdaptor(resource))
    rmm.mr.get_per_device_resource(1).allocate(10)
use(RecordedResource())
{flush}
print("flushed", cuda.devices_with_context(), driver.fake_retained(), flush=True)
use(RecordedResource())
{in_another_thread("flush(dry_run=True)")}
{in_another_thread("use(CudaMemoryResource())")}
print("over")
"""
    assert run(code, library, "-c") == ["replaced", "gone", "flushed [1] 0", "gone", "over"]


def test_pool_that_keeps_its_memory_is_not_releasable(library: Path) -> None:
    code = f"""{PROGRAM}{counted("StatisticsResourceAdaptor", "PoolMemoryResource(CudaMemoryResource(), 100)")}
(receipt,) = flush()
print(receipt.outcome, receipt.expected.high, receipt.steps[0].detail)
"""
    assert run(code, library, "c") == ["nothing 0 RMM keeps the memory of these resources until they are destroyed"]


def test_flush_neither_trims_nor_allocates_while_a_graph_is_captured(library: Path) -> None:
    code = f"""{PROGRAM}{counted("StatisticsResourceAdaptor", "CudaAsyncMemoryResource()")}
class Graph: pass
graph = Graph()
cuda.CAPTURING_GRAPHS.add(graph)
(receipt,) = flush()
print(receipt.outcome, receipt.reason, mr.allocation_counts.total_count)
"""
    assert run(code, library, "c") == ["refused a CUDA graph is being captured 2"]


def test_forked_child_does_not_query_rmm(library: Path) -> None:
    code = f"""{PROGRAM}{counted("StatisticsResourceAdaptor", "CudaAsyncMemoryResource()")}
print(len(report()), flush=True)
if os.fork() == 0:
    print(report(), [receipt.outcome for receipt in flush()], flush=True)
    os._exit(0)
os.wait()
"""
    assert run(code, library, "c") == ["1", "() ['refused']"]
