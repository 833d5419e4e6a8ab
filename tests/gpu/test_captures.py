"""A CUDA graph captured while the agent reads or flushes in another thread: a call that is unsafe then would end it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.gpu.scenes import SCENES, Scene

pytestmark = pytest.mark.gpu

CAPTURE = """
import faulthandler, sys, threading, time
faulthandler.dump_traceback_later(60, exit=True)
sys.setswitchinterval(1e-4)
{library}
from gpumond import agent

captures, ended, reads = {captures}, threading.Event(), []
def beside():
    while not ended.is_set():
        reads.append(len(agent.report()))
        {flush}
        time.sleep(0.0005)
agent.report()
reader = threading.Thread(target=beside)
reader.start()
try:
    for _ in range(captures):
        capture()
finally:
    ended.set()
    reader.join()
print(sum(reads) > captures, flush=True)
"""

TORCH = """
import torch
x = torch.ones(1 << 20, device="cuda")
def capture():
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x
        for _ in range(200):
            y = y + 1
    graph.replay()
    torch.cuda.synchronize()
    assert float(y[0]) == 201
"""

CUPY = """
import cupy
pool = cupy.cuda.MemoryAsyncPool()
cupy.cuda.set_allocator(pool.malloc)
x = cupy.ones(1 << 20)
y = cupy.empty_like(x)
def capture():
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        for _ in range(200):
            cupy.add(x, 1, out=y)
        graph = stream.end_capture()
        graph.launch()
    stream.synchronize()
    assert float(y[0]) == 2
"""


def run(scene: Scene, script: str, flush: bool) -> None:
    if reason := scene.missing():
        pytest.skip(reason)
    program = CAPTURE.format(library=script, captures=20, flush="agent.flush()" if flush else "")
    environ = {**os.environ, **dict(scene.environ)}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr[-2000:]


@pytest.mark.parametrize("flush", [False, True], ids=["reading", "flushing"])
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
def test_a_capture_is_not_spoiled(scene: Scene, flush: bool):
    run(scene, TORCH if scene.library == "torch" else CUPY, flush)
