"""Programs under fake tensors: what they allocate on a device that does not exist, by arithmetic on their sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from gpumond.facts.units import GIB, MIB
from gpumond.features.fit.command import DoesNotFit, Need, replay

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("torch") is None, reason="needs torch"),
]

TRAIN = """
import sys, torch, torch.nn as nn
assert torch.cuda.is_available()
model = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.ReLU(), nn.Linear(1024, 1024, bias=False)).to("cuda")
optimizer = torch.optim.OPTIMIZER(model.parameters(), lr=1e-3)
data = torch.utils.data.TensorDataset(torch.randn(256, 1024), torch.randn(256, 1024))
scaler = torch.amp.GradScaler("cuda", enabled=AMP)
for x, y in torch.utils.data.DataLoader(data, batch_size=64, num_workers=2):
    with torch.autocast("cuda", enabled=AMP):
        loss = nn.functional.mse_loss(model(x.to("cuda")), y.cuda())
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(loss.item())
"""
LAYER = 4 * MIB
"""Parameters of one of the two layers."""


FORKS = """
import os, runpy, sys, torch._dynamo, torch._subclasses.fake_tensor, torch.utils.data
for line in sys.stdin:
    if not os.fork():
        sys.argv[1:], sys.stdin = line.split(), open(os.devnull)
        runpy.run_module("gpumond.features.fit.tracer", run_name="__main__", alter_sys=True)
        sys.exit()
    print("status", os.wait()[1], flush=True)
"""


@pytest.fixture(scope="module")
def tracer() -> Iterator[subprocess.Popen[str]]:
    """Process that has imported PyTorch, which takes seconds, and runs each trace in a fork."""
    command = [sys.executable, "-c", FORKS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.communicate()


@pytest.fixture
def trace(tracer: subprocess.Popen[str], tmp_path: Path) -> Callable[[str], Any]:
    def traced(program: str) -> Any:
        script, out = tmp_path / "program.py", tmp_path / "trace"
        script.write_text(program)
        assert tracer.stdin
        assert tracer.stdout
        print(out, 80 * GIB, script, file=tracer.stdin, flush=True)
        assert next(line for line in tracer.stdout if line.startswith("status")) == "status 0\n"
        return json.loads(out.read_text())

    return traced


def need(found: Any) -> Need:
    assert found["reason"] == ""
    return replay(found | {"matmul": False})


def train(optimizer: str, amp: bool = False) -> str:
    return TRAIN.replace("OPTIMIZER", optimizer).replace("AMP", str(amp))


def test_parameters_gradients_and_the_state_of_an_optimizer_are_counted_once(trace: Callable[[str], Any]):
    found = trace(train("AdamW"))
    result = need(found)
    assert found["steps"] == 2
    assert result.classes["parameters"] == result.classes["gradients"] == 2 * LAYER
    assert 4 * LAYER <= result.classes["optimizer"] < 4 * LAYER + MIB
    assert 10 * LAYER < result.live_bytes <= result.held_bytes <= 14 * LAYER
    assert "a value read from a tensor (item, numpy) is 1" in found["assumptions"]


def test_a_program_with_mixed_precision_is_traced(trace: Callable[[str], Any]):
    found = trace(train("AdamW", amp=True))
    assert (found["reason"], found["steps"]) == ("", 2)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("raise ValueError('no data')", "ValueError: no data"),
        ("print('nothing')", "the program allocated nothing on a CUDA device"),
        ("import torch; torch.optim.SGD([torch.ones(1)]).step()", "the program allocated nothing on a CUDA device"),
        ("import sys; sys.exit(3)", "the program exited with status 3"),
        ("import torch; torch.ones(4).to('cuda').unique()", "DynamicOutputShapeException: "),
    ],
)
def test_a_program_that_cannot_be_traced_has_a_reason(trace: Callable[[str], Any], program: str, reason: str):
    assert trace(program)["reason"].startswith(reason)


CHECKPOINTED = """
import torch
from torch.utils.checkpoint import checkpoint
layers = [torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Dropout(0.1), torch.nn.GELU()) for _ in range(8)]
model = torch.nn.ModuleList(layers).to("cuda")
optimizer = torch.optim.SGD(model.parameters())
for _ in range(2):
    x = torch.randn(4096, 256, device="cuda", requires_grad=True)
    for layer in model:
        x = checkpoint(layer, x, use_reentrant=False) if CHECKPOINT else layer(x)
    x.sum().backward()
    optimizer.step()
"""


def test_checkpointing_needs_less_for_activations(trace: Callable[[str], Any]):
    plain, checkpointed = (
        need(trace(CHECKPOINTED.replace("CHECKPOINT", str(value)))).live_bytes for value in (False, True)
    )
    assert checkpointed < 0.6 * plain


REPLICATED = """
import torch
torch.distributed.init_process_group("nccl", rank=0, world_size=1)
model = torch.nn.Linear(1024, 1024, bias=False).to("cuda")
model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[0], gradient_as_bucket_view=VIEW)
optimizer = torch.optim.SGD(model.parameters())
for _ in range(2):
    with model.no_sync():
        model(torch.randn(1, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
"""


def test_buckets_of_data_parallel_training_are_counted(trace: Callable[[str], Any]):
    plain, view = (need(trace(REPLICATED.replace("VIEW", str(value)))) for value in (False, True))
    assert plain.classes["gradients"] == 2 * LAYER
    assert plain.live_bytes - view.live_bytes == view.classes["gradients"] == LAYER


ATTENTION = """
import torch
from torch.nn.functional import scaled_dot_product_attention
q = torch.randn(1, 8, 1024, 64, device="cuda", requires_grad=True)
k, v = (torch.randn(1, HEADS, 1024, 64, device="cuda", requires_grad=True) for _ in range(2))
scaled_dot_product_attention(q, k, v, dropout_p=0.1, enable_gqa=HEADS < 8).sum().backward()
"""


def test_attention_has_the_memory_of_the_kernels_of_a_gpu(trace: Callable[[str], Any]):
    """The weights of each pair of positions take 32 MiB, and are kept only if keys belong to several queries."""
    fused, shared = (need(trace(ATTENTION.replace("HEADS", heads))).live_bytes for heads in ("8", "2"))
    assert fused < 16 * MIB
    assert shared > 64 * MIB


def test_attention_on_the_host_is_left_alone(trace: Callable[[str], Any]):
    """A kernel of a CUDA device doesn't exist there."""
    found = trace(ATTENTION.replace("HEADS", "8").replace("cuda", "cpu"))
    assert found["reason"] == "the program allocated nothing on a CUDA device"


CONVOLUTION = """
import torch
x = torch.zeros(4, 64, 128, 128, device="cuda").to(memory_format=torch.FORMAT)
y = torch.nn.functional.conv2d(x, torch.zeros(64, 64, 3, 3, device="cuda"), padding=1)
"""


def test_convolution_needs_copies_of_images_whose_channels_are_not_last(trace: Callable[[str], Any]):
    """Input and output have 16 MiB each, the weights 144 KiB."""
    copied, plain = (
        need(trace(CONVOLUTION.replace("FORMAT", name))).live_bytes for name in ("contiguous_format", "channels_last")
    )
    assert copied == 2 * (32 * MIB + 144 * 1024)
    assert plain < 50 * MIB


NORMALIZED = """
import torch
x = torch.zeros(1 << 20, 8, device="cuda", dtype=torch.bfloat16)
with torch.autocast("cuda", dtype=torch.bfloat16, enabled=AMP):
    y = torch.nn.functional.layer_norm(x, (8,))
del x
"""


def test_autocast_normalizes_in_32_bits(trace: Callable[[str], Any]):
    plain, cast = (need(trace(NORMALIZED.replace("AMP", str(amp)))).live_bytes for amp in (False, True))
    assert cast - plain >= 16 * MIB


@pytest.mark.parametrize("name", ["'cuda'", "'cuda', 0", "'cuda:0'"])
def test_device_objects_name_the_device(trace: Callable[[str], Any], name: str):
    program = f"import torch\nx = torch.zeros(1 << 20, device=torch.device({name}))\nassert x.is_cuda is True"
    assert need(trace(program)).live_bytes == 4 * MIB


def test_a_tensor_names_its_device(trace: Callable[[str], Any]):
    program = """
import torch
x = torch.zeros(1 << 20, device="cuda")
y = torch.zeros(1 << 20, device=x.device)
assert x.device == y.device == (x + y).device == torch.device("cuda", 0)
assert torch.zeros(1).device == (x + y).cpu().device == torch.device("cpu")
"""
    assert need(trace(program)).live_bytes == 12 * MIB


IDIOMS = """
import numpy, torch
host, size = torch.zeros(1 << 20), 1 << 20
empty = torch.zeros(0, device="cuda")
kept = [
    host.to(0), host.cuda(0), host.to(torch.cuda.current_device()), host.to("cuda", torch.float32), host.to(empty),
    host.pin_memory().to("cuda", non_blocking=True), torch.empty(size, pin_memory=True).cuda(),
    torch.from_numpy(numpy.zeros(size, numpy.float32)).cuda(),
    torch.zeros(size, device=0), torch.zeros(size, device=torch.device(0)), torch.empty_like(host, device="cuda"),
    torch.randn(size, device="cuda", generator=torch.Generator(device="cuda")), empty.new_zeros(size),
    torch.nn.Linear(1024, 1024, bias=False).to(0), torch.zeros(size).to(torch.accelerator.current_accelerator()),
    torch.load("weights.pt", map_location="cuda"), torch.load("weights.pt", map_location={"cuda:0": "cuda:0"}),
]
with torch.device("cuda"), torch.cuda.device(0), torch.cuda.stream(torch.cuda.Stream()):
    kept.append(torch.zeros(size))
torch.set_default_device("cuda")
kept.append(torch.zeros(size))
torch.set_default_device(None)
torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
torch.cuda.nvtx.range_push("step")
assert (kept[0].get_device(), host.get_device()) == (0, -1)
assert kept[0].cpu().numpy().mean() == 1 and not torch.load("weights.pt", map_location="cpu").is_cuda
torch.save(kept[0], "weights.pt")
"""
"""Ways to name the device, each of which keeps 4 MiB, and calls that need a device or a value."""


def test_programs_may_name_the_device_in_any_way(tmp_path: Path, trace: Callable[[str], Any]):
    import torch

    weights = tmp_path / "weights.pt"
    torch.save(torch.zeros(1 << 20), weights)
    saved = weights.read_bytes()
    assert need(trace(IDIOMS.replace("weights.pt", str(weights)))).live_bytes == 19 * 4 * MIB
    assert weights.read_bytes() == saved, "a checkpoint was overwritten by fake values"


VALUES = """
import torch
known, large = torch.arange(6, device="cuda"), torch.randn(1 << 20, device="cuda")
assert known.tolist() == list(range(6)) and int((known > 2).sum()) == 3 and known.cpu().numpy()[5] == 5
order = torch.randperm(100).tolist()
assert sorted(order) == list(range(100)) and torch.stack([torch.tensor(3), torch.tensor(4)]).sum().item() == 7
loss = large.mean()
assert loss.item() == 1 and torch.isfinite(loss) and not torch.isnan(large).any() and not (large.max() == 0)
known += loss.long()
assert int(known.sum()) == 2, "unknown elements are 1"
"""
"""Values by which programs decide: small ones are known, and a value that only the device knows is 1."""


def test_programs_decide_by_values(trace: Callable[[str], Any]):
    found = trace(VALUES)
    assert found["reason"] == ""
    assert found["assumptions"] == ["a value read from a tensor (item, numpy) is 1"]


SELECTED = """
import torch
x = torch.randn(1 << 20, device="cuda")
y = x[x > 0]
assert y.shape == x.shape == x.masked_select(x > 0).shape
assert torch.nonzero(x > 0).shape == (1 << 20, 1)
"""


def test_a_selection_by_values_takes_all(trace: Callable[[str], Any]):
    found = trace(SELECTED)
    assert (found["reason"], found["assumptions"]) == ("", ["boolean indexing selects every element"])


def test_operators_of_inference_are_counted_as_those_of_training(trace: Callable[[str], Any]):
    program = (
        "import torch\nm = torch.nn.Linear(1024, 1024).cuda()\nwith MODE():\n    m(m(torch.zeros(4096, 1024).cuda()))"
    )
    needs = [need(trace(program.replace("MODE", f"torch.{mode}"))) for mode in ("inference_mode", "no_grad")]
    assert needs[0] == needs[1]


def test_inference_runs_to_its_end(trace: Callable[[str], Any]):
    program = "import torch\nx = torch.zeros(1 << 20, device='cuda')\ny = (x + 1).cpu()\nassert x.numel()"
    result = need(trace(program))
    assert result.live_bytes == 8 * MIB


def test_the_classes_add_up_to_the_live_bytes():
    entries = [("a", 0, 50 * MIB), ("a", 1, 50 * MIB + 1)]
    result = replay({"entries": entries, "classes": {"0": "parameters"}, "matmul": True})
    assert result.classes["activations and others"] == 50 * MIB + 512 + 2 * 32 * MIB
    assert sum(result.classes.values()) == result.live_bytes


def test_autocast_that_is_off_is_no_assumption(trace: Callable[[str], Any]):
    assert not [each for each in trace(train("SGD"))["assumptions"] if "autocast" in each]


def test_a_trace_that_exceeds_the_device_does_not_fit():
    entries = [("a", 0, 50 * MIB), ("a", 1, 50 * MIB)]
    found = {"entries": entries, "classes": {"0": "parameters"}, "matmul": False}
    assert replay(found, 128 * MIB).classes == {"parameters": 50 * MIB, "activations and others": 50 * MIB}
    with pytest.raises(DoesNotFit):
        replay(found, 64 * MIB)
