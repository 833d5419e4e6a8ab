"""cuDF's spill manager on RMM, over fakes for both and for the driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agent.driver import run

PROGRAM = """
import ctypes, os, cudf, rmm, threading
from cudf.core.buffer.spill_manager import Buffer, SpillManager, set_global_manager
from rmm.mr import *
driver = ctypes.CDLL("libcuda.so.1")
driver.fake_choose()
from gpumond.agent import flush, report
from gpumond.agent.allocators import cuda
"""
BUFFERS = """
set_global_manager(SpillManager())
first, second, exposed = Buffer(40), Buffer(20), Buffer(30, exposed=True)
"""
COUNTED = "rmm.mr.set_per_device_resource(0, StatisticsResourceAdaptor({}))\n"
SHOW = "print([(p.allocator, p.live_bytes, p.held_bytes, p.spillable_bytes, p.inside) for p in report()])\n"


def test_cudf_buffers_are_inside_rmm_and_some_can_be_spilled(library: Path) -> None:
    code = f"{PROGRAM}{COUNTED.format('CudaMemoryResource()')}{BUFFERS}{SHOW}"
    assert run(code, library, "c") == ["[('cudf', 90, 90, 60, 'rmm'), ('rmm', 90, 90, None, None)]"]


@pytest.mark.parametrize("gpus", ["-", "cc"])
def test_cudf_reports_nothing_without_exactly_one_device(library: Path, gpus: str) -> None:
    code = f"{PROGRAM}{BUFFERS}{SHOW}(r, _) = flush(steps=['spill'])\nprint(r.allocator, r.outcome, first.is_spilled)"
    assert run(code, library, gpus) == ["[]", "cudf refused False"]


def test_cudf_plans_nothing_without_a_context(library: Path) -> None:
    code = f"{PROGRAM}{BUFFERS}(r, _) = flush(steps=['spill'], dry_run=True)\nprint(r.outcome, '-', r.reason)"
    assert run(code, library, "-") == ["refused - no device has a live CUDA context"]


def test_spill_manager_is_not_created(library: Path) -> None:
    code = f"{PROGRAM}{SHOW}print([(r.allocator, r.outcome) for r in flush(steps=['spill'])][0])"
    assert run(code, library, "c") == ["[]", "('cudf', 'nothing')"]


def test_default_flush_spills_nothing(library: Path) -> None:
    code = f"{PROGRAM}{BUFFERS}(r, _) = flush()\nprint(r.allocator, r.outcome, r.expected.high, first.is_spilled)"
    assert run(code, library, "c") == ["cudf nothing 0 False"]


@pytest.mark.parametrize(
    ("resource", "trimmed"),
    [
        pytest.param("CudaMemoryResource()", "0 30", id="plain: the spill itself gave back"),
        pytest.param("CudaAsyncMemoryResource()", "316 30", id="stream-ordered: 60 and what learnt the handle"),
        pytest.param("PoolMemoryResource(CudaMemoryResource(), 100)", "0 100", id="pool: it keeps them"),
    ],
)
def test_spill_comes_before_the_trim_that_returns_its_bytes(library: Path, resource: str, trimmed: str) -> None:
    code = f"""{PROGRAM}{COUNTED.format(resource)}{BUFFERS}
spill, trim = flush(steps=["trim", "spill"])
print(spill.allocator, spill.outcome, spill.expected.likely, spill.released_bytes, spill.steps[0].step)
print(trim.allocator, trim.released_bytes, trim.after.held_bytes)
print(first.is_spilled, exposed.is_spilled, first.spilled_in, driver.fake_retained())
"""
    assert run(code, library, "c") == ["cudf freed 60 60 spill", f"rmm {trimmed}", "True False MainThread 0"]


def test_spilled_buffers_are_not_spilled_again(library: Path) -> None:
    code = f"""{PROGRAM}{BUFFERS}
first.spill(), second.spill()
(receipt, *_) = flush(steps=["spill"])
print(receipt.outcome, receipt.expected.high, receipt.released_bytes, exposed.is_spilled)
"""
    assert run(code, library, "c") == ["nothing 0 0 False"]


def test_spill_waits_for_the_device(library: Path) -> None:
    """Kernels of another thread may still read the buffers."""
    code = f"""{PROGRAM}{BUFFERS}
flush(steps=["spill"], dry_run=True)
print(driver.fake_synchronized(), first.is_spilled)
flush(steps=["spill"])
print(driver.fake_synchronized(), first.is_spilled)
"""
    assert run(code, library, "c") == ["0 False", "1 True"]


def test_large_numbers_of_buffers_are_visited_only_for_a_flush(library: Path) -> None:
    code = f"""{PROGRAM}{BUFFERS}
many = [Buffer(1) for _ in range(2_000)]
{SHOW}
(plan, _), (receipt, _) = flush(steps=["spill"], dry_run=True), flush(steps=["spill"])
print(plan.expected.likely, receipt.released_bytes, receipt.after.held_bytes)
{SHOW}
"""
    assert run(code, library, "c") == ["[]", "2060 2060 30", "[]"]
