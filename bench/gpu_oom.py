"""Out-of-memory errors on a card: calls that borrowed memory rescues, first remedies, and predicted peaks.

    python -m bench.gpu_oom [rescues] [cases] [fit] [--rounds N] [--save]

``rescues``: A caches 70 % of the card, B needs 43 %; ``added_ms`` is what a rescued call takes more than one on an
empty card, and ``equal`` says whether its result is bit for bit the same. ``cases``: programs that run out of memory
for a known reason; ``right`` counts those whose first remedy is the cause, ``passes`` those that finish with it.
``fit``: relative errors of predicted peaks against those that PyTorch measured, without and with the margin.
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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.result import publish
from gpumond.features.fit.command import MARGIN, traced
from gpumond.features.fit.replay import replay
from tests.helpers.running import RunningDaemon, until

A = """
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
B = """
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
CAUSES = ("batch", "data-set", "optimizer", "limit", "leak", "nothing", "neighbor-cache", "earlier-peak")
TRAIN = """
import json, sys, torch
from torch import nn
from torch.utils.checkpoint import checkpoint
kind, optimizer, amp, checkpointed, batch = sys.argv[1:6]
amp, checkpointed, batch = amp == "1", checkpointed == "1", int(batch)
class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.n1, self.n2, self.heads = nn.LayerNorm(dim), nn.LayerNorm(dim), heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim), nn.Dropout(0.1))
    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (each.view(b, t, self.heads, -1).transpose(1, 2) for each in self.qkv(self.n1(x)).chunk(3, 2))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.out(y)
        return x + self.mlp(self.n2(x))
class Transformer(nn.Module):
    def __init__(self, dim, layers, heads, vocabulary):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, dim), nn.Linear(dim, vocabulary, bias=False)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
        return self.head(x)
def conv(i, o, s=1):
    return nn.Sequential(nn.Conv2d(i, o, 3, s, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True))
class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a, self.b = conv(width, width), conv(width, width)
    def forward(self, x): return x + self.b(self.a(x))
def images(width, layers):
    parts = [conv(3, width, 2)]
    for scale in (1, 2, 4):
        parts += [Residual(width * scale) for _ in range(layers)] + [conv(width * scale, width * scale * 2, 2)]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width * 8, 1000))
models = {
    "gpt": (lambda: Transformer(768, 12, 12, 50257), lambda: torch.randint(0, 50257, (batch, 512))),
    "bert": (lambda: Transformer(1024, 8, 16, 30522), lambda: torch.randint(0, 30522, (batch, 256))),
    "resnet": (lambda: images(64, 4), lambda: torch.randn(batch, 3, 224, 224)),
    "mlp": (lambda: nn.Sequential(*(nn.Sequential(nn.Linear(4096, 4096), nn.GELU()) for _ in range(12))),
            lambda: torch.randn(batch * 64, 4096)),
}
build, data = models[kind]
model = build().to("cuda")
own = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-4)
for _ in range(3):
    x = data().to("cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=amp):
        y = model(x)
    y.float().square().mean().backward()
    own.step()
    own.zero_grad()
print(json.dumps([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]))
"""
CONFIGURATIONS = [
    (kind, optimizer, amp, checkpointed, batch)
    for kind, batch in (("gpt", "8"), ("bert", "16"), ("resnet", "64"), ("mlp", "16"))
    for optimizer, amp in itertools.product(("SGD", "AdamW"), ("0", "1"))
    for checkpointed in (("0", "1") if kind in ("gpt", "bert") else ("0",))
]


def python(code: str, *arguments: str, **environ: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env={**os.environ, **environ})


def asked(process: subprocess.Popen[str], line: str = "") -> str:
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
        RunningDaemon(Path(directory) / "daemon", "--source", "nvml", "--interval", "1") as running,
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
        borrower, following = python(B, **environ), python(A, **environ)
        asked(borrower)
        plain = [json.loads(asked(borrower, "plain")) for _ in range(5)]
        expected, usual = plain[0][0], statistics.median(seconds for _, seconds, _ in plain)
        failed = None
        added, rescued, equal = [], 0, True
        for number in range(rounds):
            neighbor, following = following, python(A, **environ)
            asked(neighbor)
            asked(neighbor, "cache")
            until(lambda: reclaimable(running) > 1 << 30)
            if number == 0:
                failed = json.loads(asked(borrower, "plain"))[0] is None
            result, seconds, _ = json.loads(asked(borrower, "borrow"))
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
            neighbor = python(A, **environ) if cause == "neighbor-cache" else None
            if neighbor is not None:
                asked(neighbor)
                asked(neighbor, "cache")
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
            if neighbor is not None:
                end(neighbor)
    right = sum(each["right"] for each in found.values())
    return {
        "causes": len(found),
        "right": right,
        "passes": sum(each["passes"] for each in found.values()),
        "each": found,
    }


def fits(configurations: Sequence[tuple[str, ...]] = CONFIGURATIONS) -> dict[str, Any]:
    rows, errors, held_errors, low = [], [], [], 0
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory) / "train.py"
        script.write_text(TRAIN)
        for configuration in configurations:
            run = subprocess.run([sys.executable, script, *configuration], capture_output=True, text=True, timeout=300)
            trace = traced([sys.executable, str(script), *configuration], 80 << 30)
            name = " ".join(configuration)
            if run.returncode or trace["reason"]:
                rows.append([name, trace["reason"] or run.stderr[-200:]])
                continue
            allocated, reserved = json.loads(run.stdout.splitlines()[-1])
            need = replay(trace)
            errors.append(need.live_bytes / allocated - 1)
            held_errors.append(need.held_bytes / reserved - 1)
            low += need.held_bytes * MARGIN < reserved
            rows.append([name, allocated, need.live_bytes, reserved, need.held_bytes])
    ordered = sorted(map(abs, errors))
    return {
        "configurations": len(configurations),
        "predicted": len(errors),
        "median_error_percent": round(100 * statistics.median(ordered), 2) if ordered else None,
        "p95_error_percent": round(100 * ordered[int(0.95 * (len(ordered) - 1))], 2) if ordered else None,
        "median_held_error_percent": round(100 * statistics.median(map(abs, held_errors)), 2) if held_errors else None,
        "too_low_with_margin": low,
        "rows": rows,
    }


def main() -> None:
    rounds = int(sys.argv[sys.argv.index("--rounds") + 1]) if "--rounds" in sys.argv else 50
    parts = {"rescues": lambda: rescues(rounds), "cases": cases, "fit": fits}
    chosen = [name for name in parts if name in sys.argv[1:]] or list(parts)
    publish("gpu_oom", {name: parts[name]() for name in chosen})


if __name__ == "__main__":
    main()
