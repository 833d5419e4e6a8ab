"""The agent's functions for its program on a real device, compared with the values of PyTorch and CuPy."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

SCOPE = """
import torch, gpumond.agent as agent
MIB = 1 << 20
def tensor(mib): return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")
with agent.scope("setup") as setup:
    kept = tensor(64)
assert setup.retained_bytes == torch.cuda.memory_allocated() == 64 * MIB, setup.retained_bytes
with agent.scope("epoch") as epoch:
    with agent.scope("forward"):
        rest = tensor(512), tensor(512)
    del rest
(device,) = [scope.devices[0] for scope in agent.program().scopes if scope.name == "epoch"]
assert device.peak_bytes == torch.cuda.max_memory_allocated() == 1088 * MIB and device.peak_exact, device
assert epoch.retained_bytes == 0
marked = torch.cuda.max_memory_allocated()
with agent.scope("small"):
    tensor(1)
assert torch.cuda.max_memory_allocated() == marked  # it was not reset
for _ in range(100):
    agent.step()
assert agent.program().step.live_bytes == 64 * MIB
"""

RETRY = """
import torch, gpumond.agent as agent
GIB = 1 << 30
total = torch.cuda.get_device_properties(0).total_memory
def train(size):
    held = torch.empty(size, dtype=torch.uint8, device="cuda")
    more = torch.empty(size, dtype=torch.uint8, device="cuda")
    return size
with agent.scope("train"):
    done = agent.retry_on_oom(train, shrink=lambda size: (size // 2,))(total * 3 // 4)
assert done == total * 3 // 8
program = agent.program()
assert (program.oom_retries, program.oom_recovered) == (1, 1)
(oom,) = program.ooms
assert oom.device_uuid and oom.scope == "train" and abs(oom.request_bytes - total * 3 // 4) < GIB // 64, oom
pool = oom.pools[0]
assert pool.live_bytes >= total * 3 // 4 and pool.largest_free_bytes == pool.stranded_bytes < 2 << 20, oom
assert torch.cuda.memory_allocated() == 0
"""

LIMIT = """
import torch, gpumond.agent as agent
GIB = 1 << 30
assert not agent.limit(8 * GIB)[0].applied  # CUDA is not initialized
torch.empty(GIB, dtype=torch.uint8, device="cuda")
(applied,) = agent.limit(8 * GIB)
assert applied.applied, applied
try:
    torch.empty(9 * GIB, dtype=torch.uint8, device="cuda")
except torch.cuda.OutOfMemoryError:
    pass
else:
    raise AssertionError("beyond the limit")
torch.empty(7 * GIB, dtype=torch.uint8, device="cuda")
assert agent.limit(None)[0].applied
torch.empty(9 * GIB, dtype=torch.uint8, device="cuda")
assert torch.cuda.current_device() == 0
"""

SNAPSHOT = """
import os, pickle, signal, sys, tempfile, time, torch, gpumond.agent as agent
from gpumond.agent.measure import snapshots
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
model = torch.nn.Linear(1000, 1000, device="cuda")
model(torch.ones(1, 1000, device="cuda")).sum().backward()
optimizer = torch.optim.Adam(model.parameters())
optimizer.step()
blocks = [torch.empty(300_000, dtype=torch.uint8, device="cuda") for _ in range(20_000)]
path = os.path.join(tempfile.mkdtemp(), "memory.pickle")
started = time.perf_counter()
dump = agent.snapshot(path)
seconds = time.perf_counter() - started
assert dump.path == path and dump.size_bytes == os.path.getsize(path), dump
with open(path, "rb") as file:
    content = pickle.load(file)  # the test's own file
active = sum(b["state"] == "active_allocated" for s in content["segments"] for b in s["blocks"])
assert active >= 20_000 and "device_traces" in content, active
found = [b.get("user_metadata") for s in content["segments"] for b in s["blocks"]]
assert [found.count(name) for name in ("parameters", "gradients")] == [2, 2], set(found)
assert found.count("optimizer") >= 4, set(found)
assert snapshots.write(path, must_be_fast=True).path == path
torch.cuda.memory._record_memory_history()
head = torch.nn.Linear(1000, 10, device="cuda")
assert agent.snapshot(path).reason == ""
with open(path, "rb") as file:
    history = [entry for trace in pickle.load(file)["device_traces"] for entry in trace if entry["action"] == "alloc"]
assert [entry.get("user_metadata") for entry in history].count("parameters") == 2, history
assert "records its memory history" in snapshots.write(path, must_be_fast=True).reason
assert snapshots.write(path, max_bytes=1000).path is None
print(f"20000 blocks, {dump.size_bytes} bytes in {seconds:.3f} s")
"""

CUPY = """
import cupy, gpumond.agent as agent
GIB = 1 << 30
x = cupy.empty(GIB, dtype=cupy.uint8)
total = cupy.cuda.runtime.memGetInfo()[1]
with agent.scope("a") as block:
    y = cupy.empty(GIB, dtype=cupy.uint8)
assert block.retained_bytes == GIB, block.retained_bytes
work = agent.retry_on_oom(lambda size: cupy.empty(size, dtype=cupy.uint8).nbytes, shrink=lambda size: (size // 2,))
done = work(total)
assert done == total // 2
assert agent.program().ooms[0].request_bytes == (total + 511) // 512 * 512, agent.program().ooms
agent.flush()  # what the pool has kept would still be handed out
(applied,) = agent.limit(4 * GIB)
assert applied.applied
try:
    cupy.empty(3 * GIB, dtype=cupy.uint8)
except cupy.cuda.memory.OutOfMemoryError:
    pass
else:
    raise AssertionError("beyond the limit")
assert agent.limit(None)[0].applied
z = cupy.empty(3 * GIB, dtype=cupy.uint8)
"""

JAX = """
import os
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
import jax, jax.numpy as jnp, gpumond.agent as agent
from gpumond.agent.measure.oom_record import is_oom, request_bytes
try:
    jnp.zeros((1 << 40,), dtype=jnp.uint8).block_until_ready()
except Exception as error:
    assert is_oom(error), (type(error).__mro__, str(error))
    assert request_bytes(error) == 1 << 40, str(error)
else:
    raise AssertionError("a terabyte")
"""

PROGRAMS = {"torch": (SCOPE, RETRY, LIMIT, SNAPSHOT), "cupy": (CUPY,), "jax": (JAX,)}


@pytest.mark.parametrize(
    ("library", "code"), [(library, code) for library, programs in PROGRAMS.items() for code in programs]
)
def test_agent_functions_agree_with_the_library(library: str, code: str):
    if shutil.which("nvidia-smi") is None:
        pytest.skip("needs an NVIDIA device")
    if subprocess.run([sys.executable, "-c", f"import {library}"], capture_output=True).returncode:
        pytest.skip(f"needs {library}")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
