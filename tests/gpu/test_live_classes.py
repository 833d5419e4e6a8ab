"""Classes of live bytes and the OOM record on a real device. Needs torch (CUDA)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.gpu_programs import GpuProgram
from tests.helpers.running import RunningDaemon, until

pytestmark = pytest.mark.gpu

MIB = 1 << 20
SIZE = 2 * (1024 * 1024 + 1024) * 4
"""Bytes of the parameters. Each tensor is a multiple of 512 bytes, as the allocator's blocks are."""
BUFFERS = 2 * 1024 * 4 + 8

PROGRAM = """
import dataclasses, json, sys, time
import gpumond.agent as agent
agent.start()
import torch
from gpumond.agent.loaded_allocators import ALLOCATORS
def classes(seconds=600.0):
    torch.cuda.synchronize()
    (adapter,) = [one for one in ALLOCATORS.find_adapters() if one.name == "torch"]
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


RECORDING = """
import torch._inductor.codecache  # PyTorch imports it before it names the frames of the first record
from gpumond.agent.requests import RequestHandler
from gpumond.agent.settings import AgentSettings
from gpumond.facts.messages import AgentRequest
handler = RequestHandler(AgentSettings([], []))
before = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
ALLOCATORS.find_adapters()
now = time.monotonic()
refusal = handler.start_recording(AgentRequest("one", "classes", record_seconds=1.0))
def allocate(): return torch.empty(16 << 20, dtype=torch.uint8, device="cuda")
kept = [allocate() for _ in range(3)]
for _ in range(20_000):
    torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
began = time.perf_counter()
found = handler.finish_due_recording(now + 2.0)
duration = time.perf_counter() - began
show(refusal=refusal, recording=bool(torch._C._cuda_isHistoryEnabled()), duration=duration,
     sites=[dataclasses.asdict(one) for one in found.sites], unrecorded=found.unrecorded_bytes,
     dump=found.dump.path, folded=found.folded.path, reason=found.reason)
"""
RETAINERS = """
from gpumond.agent.retainers import RetentionSearch
(adapter,) = [one for one in ALLOCATORS.find_adapters() if one.name == "torch"]
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


SUMS = """
def once(tensors):
    storages = [one.untyped_storage() for one in tensors if one is not None and one.is_cuda]
    return sum({one._cdata: one.nbytes() for one in storages}.values())
def sums(model, optimizer):
    torch.cuda.synchronize()
    state = [value for one in optimizer.state.values() for value in one.values() if isinstance(value, torch.Tensor)]
    return dict(
        parameters_bytes=once(model.parameters()), gradients_bytes=once(one.grad for one in model.parameters()),
        optimizer_bytes=once(state), buffers_bytes=once(model.buffers()), live_bytes=torch.cuda.memory_allocated())
kept = []
def train(model, optimizer, batch, loss=lambda result: result.sum()):
    for step in range(2):
        found = loss(model(**batch) if isinstance(batch, dict) else model(batch))
        found.backward()
        optimizer.step()
    kept.extend((model, optimizer, batch, found))
    print(json.dumps(sums(model, optimizer)), flush=True)
"""
SEQUENTIAL = """
import json, sys, torch
model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(8))).cuda()
train(model, torch.optim.AdamW(model.parameters()), torch.ones(64, 2048, device="cuda"))
"""
BERT = """
import json, sys, torch
from transformers import BertConfig, BertForMaskedLM
model = BertForMaskedLM(BertConfig()).cuda()
batch = {"input_ids": torch.zeros(4, 128, dtype=torch.long, device="cuda")}
train(model, torch.optim.AdamW(model.parameters()), batch, lambda result: result.logits.sum())
"""
RESNET = """
import json, sys, torch, torchvision, pytorch_lightning
model = torchvision.models.resnet50().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
train(model, optimizer, torch.ones(8, 3, 224, 224, device="cuda"))
"""
REAL = {"torch": SEQUENTIAL, "transformers": BERT, "torchvision": RESNET}
UNHANDLED = """
import json, sys, torch
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).cuda()
optimizer = torch.optim.AdamW(model.parameters())
torch.cuda.memory._record_memory_history(stacks="python")
def allocate():
    return torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
def fail():
    model(torch.ones(64, 1024, device="cuda")).sum().backward()
    optimizer.step()
    print(json.dumps(sums(model, optimizer)), flush=True)
    kept = allocate()
    return torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
fail()
"""
FOUR = ("parameters_bytes", "gradients_bytes", "optimizer_bytes", "buffers_bytes")


@contextmanager
def real(daemon: RunningDaemon, code: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, int]]]:
    """Run a program with ``gpumond run``; yield it with its own sums."""
    code = f"{SUMS}{code}\nsys.stdin.read()\n"
    command = [sys.executable, "-m", "gpumond", "run", "--", sys.executable, "-W", "ignore", "-c", code]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=daemon.environ, text=True, **pipes) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            pytest.fail(process.communicate()[1])
        try:
            yield process, json.loads(line)
        finally:
            process.kill()


@pytest.mark.parametrize("library", REAL)
def test_why_equals_the_sums_of_the_program(daemon: RunningDaemon, library: str):
    pytest.importorskip(library)
    if library == "torchvision":
        pytest.importorskip("pytorch_lightning")
    with real(daemon, REAL[library]) as (process, sums):
        until(lambda: process.pid in {agent["pid"] for agent in daemon.get("agents")})
        for _ in range(5):
            done = daemon.run("why", "--pid", str(process.pid), "--json")
            assert done.returncode == 0, done.stderr
            (classes,) = json.loads(done.stdout)["classes"]
            assert {name: classes[name] for name in FOUR} == {name: sums[name] for name in FOUR}
            assert classes["live_bytes"] == sums["live_bytes"]
            check_sum(classes)


def test_record_of_an_unhandled_error_is_complete(daemon: RunningDaemon):
    with real(daemon, UNHANDLED) as (process, sums):
        _, errors = process.communicate(timeout=120)
        assert "OutOfMemoryError" in errors

        def events() -> list[dict[str, Any]]:
            found = json.loads(daemon.request("/api/v1/events", Accept="application/json")[1])
            return [event for event in found if event["kind"] == "oom" and event["pid"] == process.pid]

        (event,) = until(events)
    details = dict(event["details"])
    assert details["request_bytes"] == 1 << 50
    assert details["line"].endswith(" fail")
    assert "allocate" in details["allocation site 1"]
    assert {name: details[f"torch {name}"] for name in FOUR} == {name: sums[name] for name in FOUR}


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
    assert classes["excess_bytes"] == 0


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
    assert (classes["tensors_bytes"], classes["activations_bytes"]) == (None, None)
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
    assert "allocate" in Path(found["folded"]).read_text()
    assert found["duration"] < 2.0


def test_variable_that_keeps_losses_is_named():
    names = [one["name"] for one in shown(RETAINERS)["found"]]
    assert "losses" in names
