"""The devices' default memory pools, over the fake driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agent.driver import run

PROGRAM = """
import ctypes
driver = ctypes.CDLL("libcuda.so.1")
def fake(index, reserved, used, pending=0):
    driver.fake_pool(index, *map(ctypes.c_uint64, (reserved, used, pending)))
import gpumond.agent.allocators.cuda
from gpumond.agent import flush, report
from gpumond.agent.allocators import cuda
"""


def test_nonempty_pools_of_devices_with_a_context_are_reported(library: Path) -> None:
    code = f"""{PROGRAM}
fake(0, 90, 90), fake(1, 64, 40, 8), fake(2, 0, 0)
(pool,) = report()
print(pool.allocator, pool.device_uuid[-1], pool.live_bytes, pool.held_bytes, pool.stranded_bytes)
print(pool.reclaimable)
print(cuda.devices_with_context(), driver.fake_retained())
"""
    assert run(code, library, "-cc") == [
        "mempool 1 48 64 0",
        "Reclaimable(low=0, likely=16, high=16, exactness='interval')",
        "[1, 2] 0",
    ]


def test_empty_default_pool_has_no_adapter(library: Path) -> None:
    assert run(f"{PROGRAM}\nprint(report(), flush())", library, "c") == ["() []"]


def test_trim_waits_for_the_device_and_creates_no_context(library: Path) -> None:
    code = f"""{PROGRAM}
fake(1, 64, 40, 8)
(plan,) = flush(dry_run=True)
(receipt,) = flush()
print(plan.outcome, plan.expected.likely, receipt.outcome, receipt.released_bytes)
print([(step.step, step.released_bytes) for step in receipt.steps], cuda.devices_with_context(), driver.fake_retained())
"""
    assert run(code, library, "-c") == ["planned 16 freed 24", "[('trim', 24)] [1] 0"]


def test_captures_of_other_threads_continue(library: Path) -> None:
    """A query of a pool in another mode than the relaxed one ends every capture of the process."""
    code = f"""{PROGRAM}
fake(0, 64, 40)
print(len(report()), flush()[0].outcome, driver.fake_spoiled(), end=" ")
print(tuple(cuda.mempool_bytes(cuda.default_pool(0))), end=" ")
print(driver.fake_spoiled() > 0)
"""
    assert run(code, library, "c") == ["1 freed 0 (40, 40) True"]


def test_device_without_a_context_is_never_made_current(library: Path) -> None:
    code = f"""{PROGRAM}
with cuda.current_context(0) as ready:
    print(ready, cuda.synchronize(0), cuda.trim_mempool(0, 1), cuda.devices_with_context(), driver.fake_retained())
"""
    assert run(code, library, "-c") == ["False False False [1] 0"]


def test_trim_is_refused_while_a_graph_is_captured(library: Path) -> None:
    code = f"""{PROGRAM}
fake(0, 64, 0)
class Graph: pass
graph = Graph()
cuda.CAPTURING_GRAPHS.add(graph)
(receipt,) = flush()
print(receipt.outcome, receipt.reason, tuple(cuda.mempool_bytes(cuda.default_pool(0))))
"""
    assert run(code, library, "c") == ["refused a CUDA graph is being captured (64, 0)"]


@pytest.mark.parametrize("has_context", [True, False])
def test_forked_child_of_a_process_with_a_context_does_not_call_the_driver(library: Path, has_context: bool) -> None:
    code = f"""{PROGRAM}
import os, time
fake(0, 64, 0)
report()
if os.fork() == 0:
    driver.fake_make_context(0)
    time.sleep(0.1)
    print(len(report()), flush=True)
    os._exit(0)
os.wait()
"""
    assert run(code, library, "c" if has_context else "-") == ["0" if has_context else "1"]


def test_flush_of_a_locked_program_is_deferred(library: Path, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.touch()
    code = f"""{PROGRAM}
import math, os, time
from gpumond.agent.loaded_allocators import ALLOCATORS
from gpumond.facts.messages import FlushCommand
fake(0, 64, 40, 8)
def flush(dry_run=False, deadline=time.monotonic() + 60):
    found = ALLOCATORS.execute(FlushCommand("f", "mempool", ("trim",), dry_run), (), deadline=deadline)
    print(found.outcome, found.reason.partition(",")[0], ALLOCATORS.read()[0].held_bytes)
flush()
flush(dry_run=True)
os.unlink({str(locked)!r})
flush()
"""
    assert run(code, library, "c", FAKE_CUDA_LOCKED=str(locked)) == [
        "deferred suspended 64",
        "deferred suspended 64",
        "freed  40",
    ]


def test_flush_that_a_suspension_overtakes_is_not_carried_out(library: Path, tmp_path: Path) -> None:
    suspended = tmp_path / "suspended"
    suspended.touch()
    code = f"""{PROGRAM}
import os, threading, time
from gpumond.agent.loaded_allocators import ALLOCATORS
from gpumond.facts.messages import FlushCommand
fake(0, 64, 40, 8)
threading.Timer(0.5, os.unlink, [{str(suspended)!r}]).start()
late = ALLOCATORS.execute(FlushCommand("f1", "mempool", ("trim",)), (), deadline=time.monotonic() + 0.1)
print(late.outcome, late.reason, late.pools[0:0], ALLOCATORS.read()[0].held_bytes)
in_time = ALLOCATORS.execute(FlushCommand("f2", "mempool", ("trim",)), (), deadline=time.monotonic() + 60)
print(in_time.outcome, ALLOCATORS.read()[0].held_bytes, driver.fake_retained())
"""
    assert run(code, library, "c", FAKE_CUDA_SUSPENDED=str(suspended)) == [
        "timeout trim: the deadline passed while the driver didn't respond; nothing was done () 64",
        "freed 40 0",
    ]
