"""Verdicts on real programs in real time: two that keep memory, a fine-tuning with evaluation, and a JAX program.

They run at the same time on one device, for twelve minutes. The two keep 300 MiB a minute after five
minutes of training. Needs torch (CUDA), transformers and JAX.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from tests.helpers.running import RunningDaemon

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200)]

FLAT_SECONDS, SECONDS = 300.0, 720.0
GROWING_SECONDS, LEAK_SECONDS = 120.0, 360.0
BERT = """
import sys, time, torch
from transformers import BertConfig, BertForMaskedLM
torch.manual_seed(0)
model = BertForMaskedLM(BertConfig()).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
def loss(batch):
    tokens = torch.randint(0, 30000, (batch, 128), device="cuda")
    return model(input_ids=tokens, labels=tokens).loss
def train():
    optimizer.zero_grad()
    found = loss(16)
    found.backward()
    optimizer.step()
    return found.item()
train()
print("ready", flush=True)
"""
KEEPS = """
def fit():
    scores, began = [], time.monotonic() + 300
    while True:
        train()
        if "step" in sys.argv:
            import gpumond.agent
            gpumond.agent.step()
        if len(scores) < time.monotonic() - began:
            scores.append(torch.empty(5 << 20, dtype=torch.uint8, device="cuda"))
        time.sleep(0.05)
fit()
"""
EVALUATES = """
for number in range(1, 10 ** 9):
    train()
    if number % 100 == 0:
        with torch.no_grad():
            outputs = [model(input_ids=torch.randint(0, 30000, (64, 128), device="cuda")).logits for _ in range(20)]
        del outputs
    time.sleep(0.05)
"""
JAX = """
import time, jax, jax.numpy as jnp
def loss(weights, batch):
    for weight in weights:
        batch = jnp.tanh(batch @ weight)
    return (batch ** 2).mean()
@jax.jit
def update(weights, batch):
    return [weight - 1e-3 * slope for weight, slope in zip(weights, jax.grad(loss)(weights, batch))]
weights = [jax.random.normal(jax.random.key(number), (4096, 4096)) for number in range(8)]
for number in range(10 ** 9):
    sizes = 256, 512, 1024
    weights = update(weights, jax.random.normal(jax.random.key(number), (sizes[number // 50 % 3], 4096)))
    jax.block_until_ready(weights)
    if number == 0:
        print("ready", flush=True)
    time.sleep(0.02)
"""
PROGRAMS = {
    "ranker": [BERT + KEEPS],
    "tagger": [BERT + KEEPS, "step"],
    "finetune": [BERT + EVALUATES],
    "forecast": [JAX],
}
KEEPING = ("ranker", "tagger")


@contextlib.contextmanager
def started(daemon: RunningDaemon, workload: str) -> Iterator[subprocess.Popen[str]]:
    script = daemon.directory / f"{workload}.py"
    text, *arguments = PROGRAMS[workload]
    script.write_text(text)
    command = [sys.executable, "-m", "gpumond", "run", "--workload", workload, "--", sys.executable, str(script)]
    environ = daemon.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "OMP_NUM_THREADS": "2"}
    with subprocess.Popen([*command, *arguments], env=environ, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_growth_and_leaks_of_real_programs(
    daemon: RunningDaemon, record_testsuite_property: Callable[[str, object], None]
) -> None:
    for library in ("torch", "transformers", "jax"):
        if not importable(library):
            pytest.skip(f"needs {library}")
    seconds: dict[tuple[str, str], float] = {}
    with contextlib.ExitStack() as stack:
        processes = {name: stack.enter_context(started(daemon, name)) for name in PROGRAMS}
        since: dict[int, tuple[str, float]] = {}
        for name, process in processes.items():
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", name
            since[process.pid] = name, time.monotonic()
        while time.monotonic() - max(began for _, began in since.values()) < SECONDS:
            for verdict in daemon.get("verdicts"):
                if verdict["kind"] in ("growing", "leak") and verdict["pid"] in since:
                    name, began = since[verdict["pid"]]
                    if (name, verdict["kind"]) not in seconds:
                        seconds[name, verdict["kind"]] = time.monotonic() - began - FLAT_SECONDS
                        record_testsuite_property(f"{name}: {verdict['kind']}", round(seconds[name, verdict["kind"]]))
            assert all(process.poll() is None for process in processes.values())
            time.sleep(1)
    assert {name for name, _ in seconds} == set(KEEPING), seconds
    for name in KEEPING:
        assert seconds[name, "growing"] <= GROWING_SECONDS, seconds
        assert seconds[name, "leak"] <= LEAK_SECONDS, seconds


def importable(name: str) -> bool:
    return subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True).returncode == 0
