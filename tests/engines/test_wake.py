"""Wake of engines that gpumond has released: at most once, only the same server, and only if it fits."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.engines.flushing import ALLOWED, World, allowed
from tests.helpers.agents import GIB
from tests.helpers.engines import device, fake_engine, used_bytes


@pytest.mark.parametrize("kind", sorted(ALLOWED.keys() - {"comfyui"}))
def test_wake_undoes_the_release_once(kind: str, tmp_path: Path):
    card = device(tmp_path)
    with fake_engine(kind, card) as engine:
        before = used_bytes(card)

        async def scenario() -> Any:
            world = World(card, allowed(engine))
            early = await world.flush(wake=True)
            await world.flush()
            planned = await world.flush(wake=True, dry_run=True)
            return early, planned, await world.flush(wake=True), await world.flush(wake=True)

        early, planned, woken, again = asyncio.run(scenario())
        assert early.outcome == again.outcome == "nothing"
        assert planned.outcome == "planned"
        assert (woken.outcome, woken.models) == ("woken", planned.models)
        assert used_bytes(card) == before
        assert not engine.record()["paused"]
        assert engine.record()["harms"] == []


def test_wake_waits_for_free_memory(tmp_path: Path):
    card = device(tmp_path)
    with fake_engine("vllm", card) as engine:

        async def scenario() -> Any:
            world = World(card, allowed(engine))
            await world.flush()
            card.attach().allocate(9 * GIB)
            refused = await world.flush(wake=True)
            card.attach().free(9 * GIB)
            return refused, await world.flush(wake=True)

        refused, woken = asyncio.run(scenario())
        assert (refused.outcome, woken.outcome) == ("refused", "woken")
        assert "it needs 5.0 GiB on device SIM-0" in refused.reason


@pytest.mark.parametrize("fault", ["pinned", "embedding"])
def test_wake_of_ollama_restores_context_and_pin(fault: str, tmp_path: Path):
    card = device(tmp_path)
    with fake_engine("ollama", card, fault) as engine:

        async def scenario() -> Any:
            world = World(card, allowed(engine, models=["llama3:8b"]))
            before = engine.send("/api/ps")
            await world.flush()
            return before, await world.flush(wake=True)

        before, woken = asyncio.run(scenario())
        assert woken.outcome == "woken"
        assert engine.send("/api/ps") == before


def test_wake_of_llama_models_that_a_request_has_loaded_does_nothing(tmp_path: Path):
    card = device(tmp_path)
    with fake_engine("llama-router", card) as engine:

        async def scenario() -> Any:
            world = World(card, allowed(engine))
            await world.flush()
            engine.send("/models/load", {"model": "qwen"})
            return await world.flush(wake=True)

        assert asyncio.run(scenario()).outcome == "woken"
        assert engine.record()["calls"].count("POST /models/load") == 1


def test_wake_of_a_restarted_server_does_nothing(tmp_path: Path):
    card = device(tmp_path)
    with fake_engine("vllm", card) as engine, fake_engine("vllm", card) as other:

        async def scenario() -> Any:
            world = World(card, allowed(engine))
            await world.flush()
            world.engines.configure([allowed(other)])
            return await world.flush(wake=True)

        assert asyncio.run(scenario()).outcome == "nothing"
        assert other.record()["harms"] == []
