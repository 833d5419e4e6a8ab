"""Classes of live bytes and the OOM record on a real device. Needs torch (CUDA)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
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
record = agent.program().ooms[-1]
show(duration=duration, classes=[dataclasses.asdict(one) for one in record.classes],
     stack=[call.function for call in record.stack], request=record.request_bytes)
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
