"""Classes of live bytes in real programs on a card: are they exact, and how long do they take.

    python -m bench.gpu_classes [--save]

Each program runs in a process of its own with the agent, started before PyTorch is imported, and trains five steps.
``visit_ms``: parameters, gradients, optimizer state and buffers. ``search_ms``: the other tensors as well, among all
objects of the interpreter. ``oom_ms``: what a recorded out-of-memory error takes more than an unrecorded one.
"""

from __future__ import annotations

import json
import subprocess
import sys

from bench.result import publish

PROGRAM = """
import json, statistics, sys, time, gc
import gpumond.agent as agent
agent.start()
import torch
NAME = sys.argv[1]
if NAME == "sequential":
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(8))).cuda()
    optimizer, batch = torch.optim.AdamW(model.parameters()), torch.ones(64, 2048, device="cuda")
    loss = lambda: model(batch).sum()
elif NAME == "bert":
    from transformers import BertConfig, BertForMaskedLM
    model = BertForMaskedLM(BertConfig()).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.zeros(4, 128, dtype=torch.long, device="cuda")
    loss = lambda: model(input_ids=batch).logits.sum()
else:
    import pytorch_lightning, torchvision
    model = torchvision.models.resnet50().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = torch.ones(8, 3, 224, 224, device="cuda")
    loss = lambda: model(batch).sum()
for _ in range(5):
    loss().backward()
    optimizer.step()
torch.cuda.synchronize()
from gpumond.agent.loaded_allocators import ALLOCATORS
(adapter,) = [each for each in ALLOCATORS.find_adapters() if each.name == "torch"]
def timed(function, times):
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        result = function()
        seconds.append(time.perf_counter() - began)
    return result, round(1e3 * statistics.median(seconds), 2)
def once(tensors):
    return sum({each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors
                if each is not None and each.is_cuda}.values())
def fail(record):
    try:
        if record:
            with agent.scope("step"):
                torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        else:
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        pass
state = [value for each in optimizer.state.values() for value in each.values() if isinstance(value, torch.Tensor)]
sums = [once(model.parameters()), once(each.grad for each in model.parameters()), once(state), once(model.buffers())]
(found,), visit = timed(adapter.live_classes, 20)
_, search = timed(lambda: adapter.live_classes(0.2), 5)
_, listing = timed(gc.get_objects, 3)
_, plain = timed(lambda: fail(False), 5)
_, recorded = timed(lambda: fail(True), 5)
print(json.dumps({
    "exact": sums == [found.parameters_bytes, found.gradients_bytes, found.optimizer_bytes, found.buffers_bytes],
    "objects": len(gc.get_objects()), "live_bytes": found.live_bytes, "visit_ms": visit, "search_ms": search,
    "list_of_objects_ms": listing, "oom_ms": round(recorded - plain, 2)}))
"""


def main() -> None:
    figures: dict[str, object] = {}
    for name in ("sequential", "bert", "resnet50"):
        command = [sys.executable, "-W", "ignore", "-c", PROGRAM, name]
        figures[name] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    publish("gpu_classes", {"device": device(), **figures, "rmm": rmm()})


def device() -> str:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()


RMM = """
import json, statistics, sys, time
import rmm
from gpumond.agent.allocators import rmm as rmm_counting
def microseconds():
    runs = []
    for _ in range(15):
        began = time.perf_counter()
        for _ in range(2000):
            rmm.DeviceBuffer(size=1024)
        runs.append((time.perf_counter() - began) / 2000 * 1e6)
    return round(statistics.median(runs), 2)
pool = rmm.mr.PoolMemoryResource(rmm.mr.CudaMemoryResource(), initial_pool_size=1 << 28)
rmm.mr.set_current_device_resource(pool)
plain = microseconds()
rmm_counting.start_counting(rmm)
rmm.mr.set_current_device_resource(pool)
print(json.dumps({"version": rmm.__version__, "pool_us": plain, "counted_us": microseconds()}))
"""


def rmm() -> object:
    """Return what an allocation from RMM's pool takes, without and with the adaptor of ``gpumond run``."""
    done = subprocess.run([sys.executable, "-c", RMM], capture_output=True, text=True)
    return json.loads(done.stdout) if done.returncode == 0 else None


if __name__ == "__main__":
    main()
