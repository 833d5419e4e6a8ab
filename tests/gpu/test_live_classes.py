"""Classes of live bytes and the OOM record on a real device. Needs torch (CUDA)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.gpu_programs import GpuProgram

pytestmark = pytest.mark.gpu

MIB = 1 << 20
SIZE = 2 * (1024 * 1024 + 1024) * 4
"""Bytes of the parameters. Each tensor is a multiple of 512 bytes, as the allocator's blocks are."""
BUFFERS = 2 * 1024 * 4 + 8

PROGRAM = """
import dataclasses, json, sys, time, torch
import gpumond.agent as agent
from gpumond.agent.registry import REGISTRY
def classes(seconds=600.0):
    torch.cuda.synchronize()
    (adapter,) = [one for one in REGISTRY.adapters() if one.name == "torch"]
    (found,) = adapter.live_classes(seconds)
    assert found.live_bytes == torch.cuda.memory_allocated()
    return dataclasses.asdict(found)
def network():
    layer = torch.nn.Linear(1024, 1024)
    return torch.nn.Sequential(layer, torch.nn.BatchNorm1d(1024, affine=False), torch.nn.Linear(1024, 1024)).cuda()
def show(**found): print(json.dumps(found))
"""
TRAINING = """
model = network()
optimizer = torch.optim.Adam(model.parameters())
batch = torch.ones(64, 1024, device="cuda")
loss = model(batch).sum()
before = classes()
loss.backward()
optimizer.step()
del loss
show(forward=before, trained=classes())
"""
INFERENCE = """
model = network().eval()
batch = torch.ones(64, 1024, device="cuda")
with torch.no_grad():
    result = model(batch)
show(found=classes())
"""
OOM = """
model = network()
optimizer = torch.optim.Adam(model.parameters())
model(torch.ones(64, 1024, device="cuda")).sum().backward()
optimizer.step()
def fail():
    with agent.scope("epoch"):
        try:
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        finally:
            fail.began = time.perf_counter()
for _ in range(5):
    try:
        fail()
    except torch.OutOfMemoryError:
        duration = time.perf_counter() - fail.began
record = next(one for one in reversed(agent.program().ooms) if one.classes)  # absent if the time was too short
show(duration=duration, classes=[dataclasses.asdict(one) for one in record.classes],
     stack=[call.function for call in record.stack], request=record.request_bytes)
"""


RECORDING = """
import torch._inductor.codecache  # PyTorch imports it before it names the frames of the first record
from gpumond.agent.administration import CommandHandler
from gpumond.protocol.messages import AgentRequest
handler = CommandHandler()
before = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
REGISTRY.adapters()
now = time.monotonic()
refusal = handler.start_recording(AgentRequest("one", "classes", record_seconds=1.0), "train", "allow")
def allocate(): return torch.empty(16 << 20, dtype=torch.uint8, device="cuda")
kept = [allocate() for _ in range(3)]
for _ in range(20_000):
    torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
began = time.perf_counter()
found = handler.finished_recording(now + 2.0)
duration = time.perf_counter() - began
show(refusal=refusal, recording=bool(torch._C._cuda_isHistoryEnabled()), duration=duration,
     sites=[dataclasses.asdict(one) for one in found.sites], unrecorded=found.unrecorded_bytes,
     dump=found.dump.path, treemap=found.treemap.path, reason=found.reason)
"""
RETAINERS = """
from gpumond.agent.retention import RetentionSearch
(adapter,) = [one for one in REGISTRY.adapters() if one.name == "torch"]
model, losses = network(), []
def train():
    losses.append(model(torch.ones(64, 1024, device="cuda")).sum())
for _ in range(5): train()
search = RetentionSearch(adapter.tracked_tensors)
for _ in range(10): train()
search.advance()
for _ in range(10): train()
show(found=[dataclasses.asdict(one) for one in search.advance()])
"""


def shown(code: str) -> dict[str, Any]:
    program = GpuProgram("torch", "torch", "")
    if reason := program.missing():
        pytest.skip(reason)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM + code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def check_sum(classes: Mapping[str, Any]) -> None:
    names = ("parameters", "gradients", "optimizer", "buffers", "tensors", "activations")
    assert sum(classes[f"{name}_bytes"] for name in names) == classes["live_bytes"]
    assert (classes["excess_bytes"], classes["exactness"]) == (0, "exact")


def test_training_with_adam_is_exact_to_the_byte():
    found = shown(TRAINING)
    forward, trained = found["forward"], found["trained"]
    for classes in (forward, trained):
        check_sum(classes)
        assert (classes["parameters_bytes"], classes["buffers_bytes"]) == (SIZE, BUFFERS)
    assert (forward["gradients_bytes"], forward["optimizer_bytes"]) == (0, 0)
    assert forward["activations_bytes"] >= 3 * 64 * 1024 * 4  # the result of each layer
    assert (trained["gradients_bytes"], trained["optimizer_bytes"]) == (SIZE, 2 * SIZE)
    assert trained["tensors_bytes"] == 64 * 1024 * 4


def test_inference_has_parameters_buffers_and_other_tensors():
    found = shown(INFERENCE)["found"]
    check_sum(found)
    assert (found["parameters_bytes"], found["buffers_bytes"]) == (SIZE, BUFFERS)
    assert (found["gradients_bytes"], found["optimizer_bytes"]) == (0, 0)
    assert found["tensors_bytes"] == 2 * 64 * 1024 * 4  # the batch and the result


def test_oom_record_has_the_classes_and_takes_at_most_50_ms():
    found = shown(OOM)
    (classes,) = found["classes"]
    assert classes["parameters_bytes"] == SIZE
    assert classes["optimizer_bytes"] == 2 * SIZE
    assert found["request"] == 1 << 50
    assert "fail" in found["stack"]
    assert found["duration"] < 0.05


def test_history_is_recorded_by_site_and_then_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    found = shown(RECORDING)
    assert (found["refusal"], found["recording"], found["reason"]) == (None, False, "")
    first = found["sites"][0]
    assert (first["size_bytes"], first["blocks"], first["calls"][0]["function"]) == (3 * 16 * MIB, 3, "allocate")
    assert found["unrecorded"] == 8 * MIB
    assert Path(found["dump"]).stat().st_size > 20_000
    assert "allocate" in Path(found["treemap"]).read_text()
    assert found["duration"] < 2.0


def test_variable_that_keeps_losses_is_named():
    names = [one["name"] for one in shown(RETAINERS)["found"]]
    assert "losses" in names
