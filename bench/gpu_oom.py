"""Out-of-memory errors on a card: calls that borrowed memory rescues, first remedies, and predicted peaks.

    python -m bench.gpu_oom [rescues] [cases] [record] [libraries] [fit] [--rounds N] [--save]

``rescues``: A caches 70% of the card, B needs 43%; ``added_ms`` is what a rescued call takes more than one on an
empty card, and ``equal`` says whether its result is bit for bit the same. ``cases``: programs that run out of memory
for a known reason; ``right`` counts those whose first remedy is the cause, ``passes`` those that finish with it.
``record``: milliseconds of a failing call whose error is recorded, and of the same call without an agent.
``libraries``: the same for CuPy, RMM and JAX beside a PyTorch program's cache, above a limit of their own, and too
large for the card. ``fit``: relative errors of predicted peaks against those that PyTorch measured, without and with
the margin; ``enough`` counts the programs that run when PyTorch may hold no more than was predicted with the margin.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.result import publish
from gpumond.features.fit.command import MARGIN_FACTOR, needed_bytes, replay, trace_program
from tests.helpers.running import RunningDaemon, until

FIRST_PROGRAM = """
import sys, torch, gpumond.agent as agent
agent.start(workload="a")
torch.zeros(1, device="cuda")
total = torch.cuda.get_device_properties(0).total_memory
print("ready", flush=True)
sys.stdin.readline()
torch.empty(int(0.7 * total), dtype=torch.uint8, device="cuda")
print("cached", flush=True)
sys.stdin.readline()
"""
SECOND_PROGRAM = """
import json, sys, time, torch, gpumond.agent as agent
agent.start(workload="b")
total = torch.cuda.get_device_properties(0).total_memory
count = int(0.43 * total) // 8
def work():
    x = torch.arange(count, device="cuda")
    return int(x.mul_(2654435761).bitwise_xor_(12345).sum())
rescued = agent.retry_on_oom(work, attempts=1, borrow=True)
work(); torch.cuda.empty_cache()
print("ready", flush=True)
for line in sys.stdin:
    began = time.perf_counter()
    try:
        result = rescued() if "borrow" in line else work()
    except torch.OutOfMemoryError:
        result = None
    seconds = time.perf_counter() - began
    torch.cuda.empty_cache()
    print(json.dumps([result, seconds, agent.program().oom_recovered]), flush=True)
"""
CASE = """
import sys, torch, gpumond.agent as agent
agent.start(workload="case")
from torch import nn
cause, fixed = sys.argv[1], sys.argv[2] == "fixed"
total = torch.cuda.get_device_properties(0).total_memory
def tensor(share): return torch.empty(int(share * total), dtype=torch.uint8, device="cuda")
def train(width, layers, batch, optimizer=torch.optim.SGD, steps=4):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers))).cuda()
    own = optimizer(model.parameters(), lr=1e-3)
    for _ in range(steps):
        model(torch.randn(batch, width, device="cuda")).square().mean().backward()
        own.step(); own.zero_grad(); agent.step()
unit = int((total / 4 / 4096) / 40)  # samples whose 40 activations of 4096 floats fill the card
if cause == "batch": train(4096, 20, unit // 4 if fixed else int(unit * 1.1))
elif cause == "data-set":
    kept = None if fixed else tensor(0.85)
    tensor(0.3)
elif cause == "optimizer":
    n = int(total * 0.3 / 4 / 4096 ** 2)
    train(4096, n, 16, torch.optim.SGD if fixed else torch.optim.AdamW)
elif cause == "limit":
    torch.zeros(1, device="cuda")
    agent.limit(None if fixed else total // 4)
    tensor(0.3)
elif cause == "leak":
    kept = []
    import time
    for _ in range(60):
        kept.append(tensor(0.02)); agent.step(); time.sleep(0.2)
        if fixed: kept.clear()
elif cause == "nothing": tensor(0.01 if fixed else 1.4)
elif cause == "neighbor-cache":
    call = agent.retry_on_oom(tensor, attempts=1, borrow=True) if fixed else tensor
    call(0.43)
elif cause == "earlier-peak":
    import time
    for step in range(12):
        with agent.scope("evaluate"):
            tensor(1.2 if step == 8 and not fixed else 0.2)
        agent.step(); time.sleep(0.3)
"""
RECORD = """
import json, sys, time, torch, gpumond.agent as agent
from torch import nn
model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(100))).cuda()
own = torch.optim.AdamW(model.parameters())
kept = [torch.empty(1 << 16, device="cuda") for _ in range(2000)]
def call(deep):
    return call(deep - 1) if deep else torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
def failing(scope=None):
    model(torch.randn(64, 1024, device="cuda")).square().mean().backward()
    own.step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    try:
        if scope is None: call(30)
        else:
            with scope: call(30)
    except torch.OutOfMemoryError:
        return 1e3 * (time.perf_counter() - began)
failing()
plain = [failing() for _ in range(20)]
agent.start(workload="record")
time.sleep(3)
print(json.dumps([plain, [failing(agent.scope("epoch")) for _ in range(20)]]))
"""
CAUSES = ("batch", "data-set", "optimizer", "limit", "leak", "nothing", "neighbor-cache", "earlier-peak")
LIBRARY = """
import sys, time, gpumond.agent as agent
agent.start(workload="case")
total, cause = int(sys.argv[1]), sys.argv[2]
size = int({"neighbor-cache": 0.43, "limit": 0.3, "nothing": 1.4}[cause] * total)
"""
LIBRARIES = {
    "cupy": """
import cupy
cupy.zeros(1)
if cause == "limit": cupy.get_default_memory_pool().set_limit(total // 4)
time.sleep(2.5)
kept = cupy.empty(size, dtype="uint8")
""",
    "rmm": """
import rmm
maximum = total // 4 // 256 * 256 if cause == "limit" else None
rmm.reinitialize(pool_allocator=True, initial_pool_size=1 << 30, maximum_pool_size=maximum)
time.sleep(2.5)
kept = rmm.DeviceBuffer(size=size)
""",
    "jax": """
import jax.numpy
jax.numpy.zeros(1).block_until_ready()
time.sleep(2.5)
kept = jax.numpy.zeros(size, dtype="uint8").block_until_ready()
""",
}
TRAIN = """
import json, os, sys, torch
from torch import nn
kind, optimizer, amp, checkpointed = sys.argv[1:5]
if len(sys.argv) > 5:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(int(sys.argv[5]) / total)
amp, checkpointed = amp == "1", checkpointed == "1"
def tokens(vocabulary, batch, length):
    return lambda: {"input_ids": (ids := torch.randint(0, vocabulary, (batch, length), device="cuda")), "labels": ids}
def language_model(name, batch, length, **sizes):
    import transformers
    model = getattr(transformers, name)(getattr(transformers, name.split("For")[0].split("LM")[0] + "Config")(**sizes))
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train(), tokens(model.config.vocab_size, batch, length)
class Images(nn.Module):
    def __init__(self, body): super().__init__(); self.body = body
    def forward(self, pixels): return [self.body(pixels).float().square().mean()]
def pixels(batch, side): return lambda: {"pixels": torch.randn(batch, 3, side, side, device="cuda")}
def conv(i, o): return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(8, o), nn.SiLU())
class UNet(nn.Module):
    def __init__(self, widths=(64, 128, 256, 512)):
        super().__init__()
        self.first = nn.Conv2d(3, widths[0], 3, padding=1)
        pairs = list(zip(widths, widths[1:]))
        self.down = nn.ModuleList(nn.Sequential(conv(i, i), conv(i, o)) for i, o in pairs)
        self.up = nn.ModuleList(nn.Sequential(conv(2 * o, i), conv(i, i)) for i, o in reversed(pairs))
        self.last = nn.Conv2d(widths[0], 3, 3, padding=1)
    def forward(self, x):
        kept, x = [], self.first(x)
        for each in self.down:
            kept.append(each(x)); x = nn.functional.max_pool2d(kept[-1], 2)
        for each in self.up:
            x = each(torch.cat([nn.functional.interpolate(x, scale_factor=2), kept.pop()], 1))
        return self.last(x)
def resnet():
    import torchvision
    return Images(torchvision.models.resnet50()), pixels(64, 224)
models = {
    "gpt2": lambda: language_model("GPT2LMHeadModel", 8, 512),
    "bert": lambda: language_model("BertForMaskedLM", 32, 128),
    "llama": lambda: language_model("LlamaForCausalLM", 4, 512, hidden_size=1024, intermediate_size=2816,
        num_hidden_layers=12, num_attention_heads=16, num_key_value_heads=4),
    "resnet": resnet,
    "unet": lambda: (Images(UNet()), pixels(16, 128)),
}
model, data = models[kind.removeprefix("ddp-")]()
model = model.to("cuda")
if kind.startswith("ddp-"):
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("nccl", rank=0, world_size=1, store=store)
    model = nn.parallel.DistributedDataParallel(model, device_ids=[0])
own = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-4)
for _ in range(3):
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=amp):
        loss = model(**data())[0]
    loss.backward()
    own.step()
    own.zero_grad()
print(json.dumps([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]))
"""
CONFIGURATIONS = [
    (kind, optimizer, amp, checkpointed)
    for kind in ("gpt2", "bert", "llama", "resnet", "unet", "ddp-gpt2", "ddp-resnet")
    for optimizer, amp in itertools.product(("SGD", "AdamW"), ("0", "1"))
    for checkpointed in (("0", "1") if kind in ("gpt2", "bert") else ("0",))
]


def python(code: str, *arguments: str, **environ: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env={**os.environ, **environ})


def next_line(process: subprocess.Popen[str], line: str = "") -> str:
    """Send a line if there is one, and return the next one of the program."""
    assert process.stdin is not None
    assert process.stdout is not None
    if line:
        process.stdin.write(line + "\n")
        process.stdin.flush()
    return process.stdout.readline().strip()


@contextmanager
def daemon() -> Iterator[RunningDaemon]:
    with (
        tempfile.TemporaryDirectory() as directory,
        RunningDaemon(Path(directory) / "daemon", "--source", "nvml", "--interval", "1s") as running,
    ):
        until(lambda: running.request("/api/v1/agents")[0] == 200)
        yield running


def end(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        process.kill()
        process.communicate()


def reclaimable(running: RunningDaemon) -> int:
    return sum(pool["reclaimable"]["likely"] for each in running.get("agents") for pool in each["pools"])


def rescues(rounds: int) -> dict[str, Any]:
    with daemon() as running:
        environ = {"GPUMOND_SOCKET": str(running.socket)}
        borrower, following = python(SECOND_PROGRAM, **environ), python(FIRST_PROGRAM, **environ)
        next_line(borrower)
        plain = [json.loads(next_line(borrower, "plain")) for _ in range(5)]
        expected, usual = plain[0][0], statistics.median(seconds for _, seconds, _ in plain)
        failed = None
        added, rescued, equal = [], 0, True
        for number in range(rounds):
            neighbor, following = following, python(FIRST_PROGRAM, **environ)
            next_line(neighbor)
            next_line(neighbor, "cache")
            until(lambda: reclaimable(running) > 1 << 30)
            if number == 0:
                failed = json.loads(next_line(borrower, "plain"))[0] is None
            result, seconds, _ = json.loads(next_line(borrower, "borrow"))
            if result is not None:
                rescued += 1
                equal = equal and result == expected
                added.append(seconds - usual)
            end(neighbor)
        end(borrower, following)
    return {
        "rounds": rounds,
        "fails_without": failed,
        "rescued": rescued,
        "equal": equal,
        "added_ms_median": round(1e3 * statistics.median(added), 1) if added else None,
        "added_ms_max": round(1e3 * max(added), 1) if added else None,
    }


def cases(causes: Sequence[str] = CAUSES) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for cause in causes:
        with daemon() as running:
            environ = {"GPUMOND_SOCKET": str(running.socket)}
            neighbor = python(FIRST_PROGRAM, **environ) if cause == "neighbor-cache" else None
            if neighbor is not None:
                next_line(neighbor)
                next_line(neighbor, "cache")
                until(lambda: reclaimable(running) > 1 << 30)
            process = python(CASE, cause, "broken", **environ)
            process.communicate(timeout=300)
            ended = time.monotonic()
            until(lambda: running.get("oom"), 30)
            ready = time.monotonic() - ended
            case = running.get("oom/last")["case"]
            first = case["remedies"][0] if case["remedies"] else {"name": "", "text": ""}
            fixed = python(CASE, cause, "fixed", **environ)
            fixed.communicate(timeout=300)
            found[cause] = {
                "first": first["name"],
                "right": first["name"] == cause,
                "passes": fixed.returncode == 0,
                "ready_seconds": round(ready, 1),
                "bytes": len(json.dumps(case)),
                "summary": case["summary"],
            }
            print(cause, found[cause], file=sys.stderr)
            if neighbor is not None:
                end(neighbor)
    return {
        "causes": len(found),
        "right": sum(each["right"] for each in found.values()),
        "passes": sum(each["passes"] for each in found.values()),
        "latest_seconds": max(each["ready_seconds"] for each in found.values()),
        "largest_bytes": max(each["bytes"] for each in found.values()),
        "wrong": {cause: each["summary"] for cause, each in found.items() if not each["right"]},
    }


def record() -> dict[str, Any]:
    with daemon() as running:
        process = python(RECORD, GPUMOND_SOCKET=str(running.socket))
        plain, recorded = json.loads(process.communicate(timeout=300)[0])
    return {
        "plain_ms_median": round(statistics.median(plain), 1),
        "recorded_ms_median": round(statistics.median(recorded), 1),
        "recorded_ms_max": round(max(recorded), 1),
        "most_added_ms": round(max(recorded) - statistics.median(plain), 1),
    }


def libraries() -> dict[str, Any]:
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    total = int(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]) << 20
    found: dict[str, str] = {}
    for library, cause in itertools.product(LIBRARIES, ("neighbor-cache", "limit", "nothing")):
        with daemon() as running:
            environ = {"GPUMOND_SOCKET": str(running.socket), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
            if cause == "limit":
                environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.25"
            neighbors = [python(FIRST_PROGRAM, **environ)] if cause == "neighbor-cache" else []
            for neighbor in neighbors:
                next_line(neighbor)
                next_line(neighbor, "cache")
                until(lambda: reclaimable(running) > 1 << 30)
            python(LIBRARY + LIBRARIES[library], str(total), cause, **environ).communicate(timeout=300)
            until(lambda: running.get("oom"), 30)
            remedies = running.get("oom/last")["case"]["remedies"]
            found[f"{library}: {cause}"] = remedies[0]["name"] if remedies else ""
            print(f"{library}: {cause}:", *(each["text"] for each in remedies), sep="\n  ", file=sys.stderr)
            end(*neighbors)
    wrong = {case: name for case, name in found.items() if not case.endswith(name or "none")}
    return {"causes": len(found), "right": len(found) - len(wrong), "wrong": wrong}


def measured(configuration: tuple[str, ...], script: Path) -> list[Any]:
    """Return allocated and held peak of a configuration, each as PyTorch counts it and as predicted, and whether it
    runs with the predicted bytes; or a reason.
    """
    command, name = [sys.executable, os.fspath(script), *configuration], " ".join(configuration)
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    trace = trace_program(command, 80 << 30)
    if run.returncode or trace["reason"]:
        return [name, trace["reason"] or run.stderr[-200:]]
    need, (allocated, reserved) = replay(trace), json.loads(run.stdout.splitlines()[-1])
    limited = subprocess.run([*command, str(needed_bytes(need, None))], capture_output=True, timeout=300)
    return [name, allocated, need.live_bytes, reserved, need.held_bytes, limited.returncode == 0]


def fits(configurations: Sequence[tuple[str, ...]] = CONFIGURATIONS) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(4) as pool:
        script = Path(directory) / "train.py"
        script.write_text(TRAIN)
        rows = list(pool.map(lambda each: measured(each, script), configurations))
    predicted = [row for row in rows if len(row) == 6]
    errors = sorted(abs(live / allocated - 1) for _, allocated, live, *_ in predicted)
    held_errors = [abs(held / reserved - 1) for *_, reserved, held, _ in predicted]
    return {
        "configurations": len(configurations),
        "predicted": len(predicted),
        "median_error_percent": round(100 * statistics.median(errors), 2) if errors else None,
        "p95_error_percent": round(100 * errors[int(0.95 * (len(errors) - 1))], 2) if errors else None,
        "max_error_percent": round(100 * errors[-1], 2) if errors else None,
        "median_held_error_percent": round(100 * statistics.median(held_errors), 2) if held_errors else None,
        "most_held_above_percent": round(
            100 * max(held / predicted_held - 1 for *_, held, predicted_held, _ in predicted), 2
        )
        if predicted
        else None,
        "too_low_with_margin": sum(live * MARGIN_FACTOR < allocated for _, allocated, live, *_ in predicted),
        "enough": sum(row[-1] for row in predicted),
        "not_enough": [row[0] for row in predicted if not row[-1]],
        "held_too_low_with_margin": sum(held * MARGIN_FACTOR < reserved for *_, reserved, held, _ in predicted),
    }


def main() -> None:
    rounds = int(sys.argv[sys.argv.index("--rounds") + 1]) if "--rounds" in sys.argv else 50
    parts = {"rescues": lambda: rescues(rounds), "cases": cases, "record": record, "libraries": libraries, "fit": fits}
    chosen = [name for name in parts if name in sys.argv[1:]] or list(parts)
    publish("gpu_oom", {name: parts[name]() for name in chosen})


if __name__ == "__main__":
    main()
