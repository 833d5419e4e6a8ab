"""A real llama.cpp router on the CPU, with a model of 300 kB. A record of the simulated device stands for its memory.

GPUMOND_LLAMA_SERVER names the program llama-server.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpumond.features.engines.settings import EngineConfig
from gpumond.host.machine import read_start_ticks
from gpumond.sim.device import SimDevice
from tests.engines.flushing import World
from tests.helpers.agents import GIB
from tests.helpers.engines import FakeEngine, device, used_bytes
from tests.helpers.running import free_port, until

SERVER = os.environ.get("GPUMOND_LLAMA_SERVER", "")

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not SERVER, reason="needs llama-server in GPUMOND_LLAMA_SERVER"),
]

WIDTH, INNER, WORDS = 64, 128, 259
U32, F32, STRING, ARRAY, I32 = 4, 6, 8, 9, 5


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(kind: int, values: list[bytes]) -> bytes:
    return struct.pack("<IQ", kind, len(values)) + b"".join(values)


def write_model(path: Path) -> None:
    """Write a model of one layer with constant weights, in the format GGUF 3."""
    numbers = {
        "context_length": 256,
        "embedding_length": WIDTH,
        "block_count": 1,
        "feed_forward_length": INNER,
        "attention.head_count": 2,
        "attention.head_count_kv": 2,
        "rope.dimension_count": WIDTH // 2,
        "vocab_size": WORDS,
    }
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    values = [
        entry("general.architecture", STRING, text("llama")),
        *(entry(f"llama.{key}", U32, struct.pack("<I", number)) for key, number in numbers.items()),
        entry("llama.attention.layer_norm_rms_epsilon", F32, struct.pack("<f", 1e-5)),
        entry("tokenizer.ggml.model", STRING, text("llama")),
        entry("tokenizer.ggml.tokens", ARRAY, array(STRING, [text(token) for token in tokens])),
        entry("tokenizer.ggml.scores", ARRAY, array(F32, [struct.pack("<f", 0.0)] * WORDS)),
        entry("tokenizer.ggml.token_type", ARRAY, array(I32, [struct.pack("<i", t) for t in (2, 3, 3, *[6] * 256)])),
    ]
    block = {
        "attn_norm": (WIDTH,),
        "ffn_norm": (WIDTH,),
        **{f"attn_{part}": (WIDTH, WIDTH) for part in ("q", "k", "v", "output")},
        "ffn_gate": (WIDTH, INNER),
        "ffn_up": (WIDTH, INNER),
        "ffn_down": (INNER, WIDTH),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (WIDTH, WORDS),
        "output_norm.weight": (WIDTH,),
        "output.weight": (WIDTH, WORDS),
        **{f"blk.0.{name}.weight": shape for name, shape in block.items()},
    }
    head, data = b"", b""
    for name, shape in shapes.items():
        head += text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
        head += struct.pack("<IQ", 0, len(data))
        size = shape[0] * (shape[1] if len(shape) > 1 else 1)
        data += struct.pack("<f", 0.01) * size
        data += bytes(-len(data) % 32)
    start = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(values)) + b"".join(values) + head
    path.write_bytes(start + bytes(-len(start) % 32) + data)


@contextmanager
def router(directory: Path) -> Iterator[FakeEngine]:
    (directory / "models").mkdir()
    write_model(directory / "models" / "tiny.gguf")
    port = free_port()
    command = [SERVER, "--host", "127.0.0.1", "--port", str(port), "--metrics", "--device", "none", "-t", "1"]
    command += ["--models-dir", str(directory / "models"), "-c", "256"]
    environ = {**os.environ, "LD_LIBRARY_PATH": str(Path(SERVER).parent)}
    with (directory / "log").open("wb") as log:
        process: Any = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
    engine = FakeEngine("llama-router", f"http://127.0.0.1:{port}", process)
    try:
        until(lambda: listens(engine), 60)
        yield engine
    finally:
        process.terminate()
        process.wait(20)


def listens(engine: FakeEngine) -> bool:
    try:
        return bool(engine.send("/models")["data"])
    except OSError:
        return False


def status(engine: FakeEngine) -> str:
    (model,) = engine.send("/models")["data"]
    return str(model["status"]["value"])


def child(engine: FakeEngine) -> int:
    children = Path(f"/proc/{engine.process.pid}/task").glob("*/children")
    return next(int(pid) for path in children for pid in path.read_text().split())


def attribute(card: SimDevice, pid: int) -> None:
    """Make the simulated driver count 4 GiB for a process, until it ends."""
    record = card.directory / "processes" / f"{pid}-{read_start_ticks(pid)}"
    record.write_text(json.dumps([4 * GIB, None, None, None]))


def declaration(engine: FakeEngine) -> EngineConfig:
    fields = {"name": "models", "kind": "llama-router", "url": engine.url}
    return EngineConfig.model_validate(fields)


def test_real_router_is_read_released_and_woken(tmp_path: Path):
    card = device(tmp_path)
    with router(tmp_path) as engine:

        async def scenario() -> None:
            world = World(card, declaration(engine))
            assert (await world.engines.read("models")).models == ()
            assert status(engine) == "unloaded"  # the read has loaded nothing
            await asyncio.to_thread(engine.send, "/models/load", {"model": "tiny"})
            await asyncio.to_thread(until, lambda: status(engine) == "loaded", 60)
            attribute(card, child(engine))
            state = await world.engines.read("models")
            assert ([model.name for model in state.models], state.requests) == (["tiny"], 0)
            receipt = await world.flush("models")
            assert (receipt.outcome, receipt.driver_released_bytes) == ("gone", 4 * GIB)
            assert receipt.pid == engine.process.pid
            assert status(engine) == "unloaded"

        asyncio.run(scenario())
        assert used_bytes(card) == 0
