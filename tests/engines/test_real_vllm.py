"""A real vLLM on the CPU, with a tiny model of random weights. The calls that its worker ignores on a CPU are counted.

GPUMOND_VLLM names the program vllm of an environment with vLLM for CPUs. A record of the simulated device stands for
the memory of its worker.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpumond.facts.pools import Receipt
from gpumond.features.engines.settings import EngineConfig
from gpumond.sim.device import SimDevice
from tests.engines.flushing import World, reached
from tests.helpers.agents import GIB
from tests.helpers.engines import FakeEngine, device, used_bytes
from tests.helpers.running import free_port, until

VLLM = os.environ.get("GPUMOND_VLLM", "")

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not VLLM, reason="needs the program vllm of vLLM for CPUs in GPUMOND_VLLM"),
]

PLUGIN = """
import os, sys

def write(size):
    pid = os.getpid()
    with open(f"/proc/{pid}/stat") as file:
        ticks = file.read().rpartition(")")[2].split()[19]
    with open(os.path.join(os.environ["RECORDS"], f"{pid}-{ticks}"), "w") as file:
        file.write(f"[{size}, null, null, null]")

def counting(name, size, original):
    def call(self, *arguments, **options):
        with open(os.environ["COUNTS"], "a") as file:
            file.write(name + "\\n")
        with open(os.environ["FAULTS"]) as file:
            faults = file.read()
        if f"{name} fails" in faults:
            raise RuntimeError(name + " fails")
        if f"{name} lies" not in faults:
            write(size)
        return original(self, *arguments, **options) if name == "load_model" else None
    return call

def register():
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker.cpu_worker import CPUWorker
    CpuPlatform.is_sleep_mode_available = lambda self: True
    sizes = {"load_model": HELD, "sleep": LEFT, "discard": LEFT, "wake_up": HELD}
    for name, size in sizes.items():
        setattr(CPUWorker, name, counting(name, size, getattr(CPUWorker, name)))
"""
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 251,
    "eos_token_id": 251,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
HELD, LEFT = 12 * GIB, GIB


def write_model(directory: Path) -> None:
    """Write the configuration of a model and a tokenizer of 252 words; its weights are random."""
    directory.mkdir()
    words = {**{f"t{number}": number for number in range(250)}, "<unk>": 250, "</s>": 251}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"}
    splits = {"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, "added_tokens": []}
    unused = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "eos_token": "</s>"}
    (directory / "config.json").write_text(json.dumps(MODEL))
    (directory / "tokenizer.json").write_text(json.dumps(splits | unused | {"model": model}))
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))


@contextmanager
def server(directory: Path, card: SimDevice, *options: str) -> Iterator[FakeEngine]:
    """Start the server, which takes minutes on a loaded machine. ``faults`` in the directory is read at each call."""
    (directory / "faults").write_text("")
    write_model(directory / "model")
    plugins, port = directory / "plugins", free_port()
    (plugins / "counting-0.dist-info").mkdir(parents=True)
    (plugins / "counting.py").write_text(PLUGIN.replace("HELD", str(HELD)).replace("LEFT", str(LEFT)))
    (plugins / "counting-0.dist-info" / "METADATA").write_text("Name: counting\nVersion: 0\n")
    (plugins / "counting-0.dist-info" / "entry_points.txt").write_text(
        "[vllm.general_plugins]\ncounting = counting:register\n"
    )
    command = [VLLM, "serve", str(directory / "model"), "--served-model-name", "tiny", "--load-format", "dummy"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "256", "--enforce-eager"]
    own = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "PYTHONPATH": str(plugins),
        "COUNTS": str(directory / "counts"),
        "FAULTS": str(directory / "faults"),
        "RECORDS": str(card.directory / "processes"),
    }
    with (directory / "log").open("wb") as log:
        process: Any = subprocess.Popen(
            [*command, "--enable-sleep-mode", *options], env={**os.environ, **own}, stdout=log, stderr=log
        )
    engine = FakeEngine("vllm", f"http://127.0.0.1:{port}", process)
    try:
        until(lambda: process.poll() is not None or serves(engine), 800)
        assert process.poll() is None, (directory / "log").read_text()[-3000:]
        yield engine
    finally:
        process.terminate()
        process.wait(60)


def serves(engine: FakeEngine) -> bool:
    try:
        answer = engine.send("/v1/completions", {"model": "tiny", "prompt": [1, 2], "max_tokens": 2})
    except OSError:
        return False
    return isinstance(answer, dict) and bool(answer.get("choices"))


def counts(directory: Path) -> dict[str, int]:
    """Return the calls since the last time."""
    names = (directory / "counts").read_text().split()
    (directory / "counts").write_text("")
    return {name: names.count(name) for name in ("sleep", "discard", "wake_up")}


def declaration(engine: FakeEngine, method: str = "kv_cache") -> EngineConfig:
    fields = {"name": "e", "kind": "vllm", "url": engine.url, "allow": ["engine"], "method": method}
    return EngineConfig.model_validate(fields)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeEngine, SimDevice, Path]]:
    directory = tmp_path_factory.mktemp("vllm")
    card = device(directory, 32)
    with server(directory, card) as engine:
        yield engine, card, directory


@pytest.mark.parametrize(("method", "call"), [("kv_cache", "discard"), ("sleep", "sleep")])
def test_real_vllm_is_released_and_woken(running: tuple[FakeEngine, SimDevice, Path], method: str, call: str):
    engine, card, directory = running
    counts(directory)

    async def scenario() -> tuple[Receipt, Receipt]:
        world = World(card, declaration(engine, method))
        released = await world.flush()
        state = await world.engines.read("e")
        assert (state.sleeping, state.paused, state.serves) == (True, True, False)
        return released, await world.flush(wake=True)

    released, woken = asyncio.run(scenario())
    assert (released.outcome, released.driver_released_bytes) == ("freed", HELD - LEFT), released.reason
    assert (woken.outcome, used_bytes(card)) == ("woken", HELD)
    assert counts(directory) == {"sleep": 0, "discard": 0, "wake_up": 1} | {call: 1}
    assert serves(engine)


@pytest.mark.parametrize(("faults", "outcome"), [("discard lies", "nothing"), ("discard fails", "refused")])
def test_real_vllm_whose_release_has_no_effect_serves_again(
    running: tuple[FakeEngine, SimDevice, Path], faults: str, outcome: str
):
    engine, card, directory = running
    counts(directory)
    (directory / "faults").write_text(faults)

    async def scenario() -> Receipt:
        world = World(card, declaration(engine))
        receipt = await world.flush()
        assert await reached(lambda: bool(world.kept))
        await world.flusher.close()
        return receipt

    receipt = asyncio.run(scenario())
    (directory / "faults").write_text("")
    assert receipt.outcome == outcome, receipt.reason
    assert receipt.reason.endswith("gpumond is returning the engine to service")
    assert counts(directory) == {"sleep": 0, "discard": 1, "wake_up": 1}
    assert engine.send("/is_paused") == {"is_paused": False}
    assert engine.send("/is_sleeping") == {"is_sleeping": False}
    assert serves(engine)


def test_real_vllm_without_statistics_is_left_alone(tmp_path: Path):
    card = device(tmp_path, 32)
    with server(tmp_path, card, "--disable-log-stats") as engine:
        receipt = asyncio.run(World(card, declaration(engine)).flush())
        assert (receipt.outcome, "--disable-log-stats" in receipt.reason) == ("refused", True)
        assert counts(tmp_path) == {"sleep": 0, "discard": 0, "wake_up": 0}
        assert serves(engine)
