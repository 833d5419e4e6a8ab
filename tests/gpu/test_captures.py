"""CUDA graphs captured while the agent reads or flushes in another thread: an unsafe call would end the capture."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.gpu.gpu_programs import PROGRAMS

pytestmark = pytest.mark.gpu

START = """
import faulthandler, sys, threading, time
faulthandler.dump_traceback_later(60, exit=True)
sys.setswitchinterval(1e-4)
from gpumond import agent
from gpumond.agent.allocators import cuda
def held_now():
    with cuda.relaxed_capture_mode():  # to look at a stream-ordered pool would end the capture that looks
        return held()
"""

TORCH = """
import torch
x = torch.ones(1 << 20, device="cuda") + 0  # an addition is loaded before a capture
aside = torch.cuda.Stream()
held = torch.cuda.memory_reserved
def waste():
    del [torch.empty(64 << 20, dtype=torch.uint8, device="cuda")][:]
    torch.cuda.synchronize()
def capture(meanwhile=lambda: None):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(aside):
        graph.capture_begin()
        meanwhile()
        y = x
        for _ in range(200):
            y = y + 1
        graph.capture_end()
    graph.replay()
    torch.cuda.synchronize()
    assert float(y[0]) == 201
"""

CUPY = """
import cupy
pool = cupy.cuda.{pool}()
cupy.cuda.set_allocator(pool.malloc)
x = cupy.ones(1 << 20)
y = cupy.empty_like(x)
held = pool.total_bytes
def waste():
    del [cupy.empty(64 << 20, dtype=cupy.uint8)][:]
    cupy.cuda.Device().synchronize()
def capture(meanwhile=lambda: None):
    stream = cupy.cuda.Stream(non_blocking=True)
    y.fill(0)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        meanwhile()
        for _ in range(200):
            cupy.add(x, 1, out=y)
        graph = stream.end_capture()
        graph.launch()
    stream.synchronize()
    assert float(y[0]) == 2
cupy.add(x, 1, out=y)  # its kernel is compiled before a capture
"""

CONCURRENT_READER = """
captures, ended, reads, released = 20, threading.Event(), [], []
def read_repeatedly():
    while not ended.is_set():
        reads.append(len(agent.report()))
        if FLUSH:
            released.append(sum(receipt.released_bytes for receipt in agent.flush()))
        time.sleep(0.0005)
agent.report()
reader = threading.Thread(target=read_repeatedly)
reader.start()
try:
    while captures > 0 or sum(reads) < 20 or (FLUSH and not sum(released)):
        waste()
        capture()
        captures -= 1
finally:
    ended.set()
    reader.join()
print("done", flush=True)
"""

REFUSED = """
def elsewhere(call):
    answers = []
    thread = threading.Thread(target=lambda: answers.append(call()))
    thread.start(), thread.join()
    return answers[0]
agent.report()
during = []
waste()
before = held_now()
capture(lambda: during.extend((elsewhere(agent.flush), elsewhere(lambda: agent.flush(dry_run=True)), held_now())))
receipts, plans, then = during
print({(receipt.outcome, receipt.reason) for receipt in receipts + plans}, then >= before)
print(sum(receipt.released_bytes for receipt in agent.flush()) > 0)
"""

WAITS = """
under_way, released = threading.Event(), []
@agent.on_flush
def slow():
    under_way.set()
    time.sleep(0.3)
agent.report()
waste()
before = held_now()
def flush():
    released.extend(receipt.released_bytes for receipt in agent.flush(("hooks", "cache", "trim")))
flusher = threading.Thread(target=flush)
flusher.start()
under_way.wait()
during = []
capture(lambda: during.append(held_now()))
flusher.join()
own = 4 << 20  # a capture begins with small blocks of its own
print(sum(released) > 2 * own, during[0] <= before - sum(released) + own)
"""

OF_CUPY = next(program for program in PROGRAMS if program.library == "cupy")
SETUPS = {program.name: (program, TORCH) for program in PROGRAMS if program.library == "torch"} | {
    "cupy": (OF_CUPY, CUPY.format(pool="MemoryPool")),
    "cupy-async": (OF_CUPY, CUPY.format(pool="MemoryAsyncPool")),
}
setups = pytest.mark.parametrize("setup", SETUPS)


def run(setup: str, code: str) -> list[str]:
    program, library = SETUPS[setup]
    if reason := program.missing():
        pytest.skip(reason)
    environ = {**os.environ, **dict(program.environ)}
    command = [sys.executable, "-c", START + library + code]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


@setups
@pytest.mark.parametrize("flush", [False, True], ids=["reading", "flushing"])
def test_capture_is_not_ended_by_the_agent(setup: str, flush: bool):
    assert run(setup, f"FLUSH = {flush}\n{CONCURRENT_READER}") == ["done"]


@setups
def test_flush_during_a_capture_is_refused(setup: str):
    assert run(setup, REFUSED) == ["{('refused', 'a CUDA graph is being captured')} True", "True"]


@pytest.mark.parametrize("setup", [name for name in SETUPS if name != "cupy-async"])
def test_capture_waits_for_a_flush_in_progress(setup: str):
    """CuPy's stream-ordered pool belongs to the driver, which is flushed after CuPy: the capture begins in between."""
    assert run(setup, WAITS) == ["True True"]
