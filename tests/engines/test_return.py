"""A server that a release took out of service for nothing serves again, by gpumond alone."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpumond.facts.pools import Receipt
from gpumond.features.engines.flush_step import has_released_too_little
from tests.engines.flushing import ALLOWED, BRIEF, Short, World, allowed, reached
from tests.helpers.agents import GIB
from tests.helpers.engines import FakeEngine, device, fake_engine, used_bytes


def serves(engine: FakeEngine) -> bool:
    return engine.begin_request().finish() == {"text": "done"}


@pytest.mark.parametrize(
    ("faults", "outcome"),
    [
        (["lie"], "nothing"),
        (["rejects"], "refused"),
        (["rejects", "wake-fails", "wake-fails"], "refused"),
    ],
)
@pytest.mark.parametrize("method", ["kv_cache", "sleep"])
def test_release_without_effect_returns_vllm_to_service(method: str, faults: list[str], outcome: str, tmp_path: Path):
    card = device(tmp_path)
    with fake_engine("vllm", card, *faults) as engine:
        before = used_bytes(card)

        async def scenario() -> Receipt:
            world = World(card, allowed(engine, method=method))
            receipt = await world.flush()
            assert await reached(lambda: bool(world.kept))
            (woken,) = world.kept
            assert (woken.outcome, woken.requested_by, world.flusher.receipts[-1]) == ("woken", "test", woken)
            assert (await world.flush(wake=True)).outcome == "nothing"
            await world.flusher.close()
            return receipt

        receipt = asyncio.run(scenario())
        assert receipt.outcome == outcome
        assert receipt.reason.endswith("; gpumond is returning the engine to service")
        assert not engine.record()["paused"]
        assert engine.send("/is_sleeping") == {"is_sleeping": False}
        assert serves(engine)
        assert used_bytes(card) == before
        assert engine.record()["harms"] == []


@pytest.mark.parametrize("kind", ["lmdeploy", "tensorrt-llm", "triton"])
def test_release_without_effect_returns_each_kind_to_service(kind: str, tmp_path: Path):
    card = device(tmp_path)
    with fake_engine(kind, card, "lie") as engine:

        async def scenario() -> None:
            world = World(card, allowed(engine), timing=BRIEF)
            assert (await world.flush()).outcome == "nothing"
            assert await reached(lambda: bool(world.kept))
            await world.flusher.close()

        asyncio.run(scenario())
        assert not engine.record()["paused"]


@pytest.mark.parametrize("fault", ["hang", "pause-hangs"])
def test_server_that_does_not_answer_in_time_is_returned_to_service(fault: str, tmp_path: Path):
    card = device(tmp_path)
    with fake_engine("vllm", card, fault) as engine:

        async def scenario() -> None:
            world = Short(card, allowed(engine))
            assert (await world.flush()).outcome == "timeout"
            assert await reached(lambda: bool(world.kept))
            await world.flusher.close()

        asyncio.run(scenario())
        assert not engine.record()["paused"]
        assert serves(engine)


def test_pause_that_drains_for_long_is_ended_when_it_has_drained(tmp_path: Path):
    """Data parallel: a resume during the drain is an error, and the server would stay paused after it."""
    card = device(tmp_path)
    with fake_engine("vllm", card, "data-parallel", "pause-hangs") as engine:

        async def scenario() -> None:
            world = Short(card, allowed(engine))
            flushing = asyncio.ensure_future(world.flush())
            assert await reached(lambda: "POST /pause?mode=wait" not in engine.record()["calls"])
            assert (await flushing).outcome == "timeout"
            assert await reached(lambda: bool(world.kept))
            await world.flusher.close()

        asyncio.run(scenario())
        assert not engine.record()["paused"]


def test_reading_states_that_a_server_does_not_serve_yet(tmp_path: Path):
    card = device(tmp_path)
    with fake_engine("vllm", card, "lie", *["wake-fails"] * 1000) as engine:

        async def scenario() -> Any:
            world = World(card, allowed(engine), timing=BRIEF)
            await world.flush()
            assert await reached(lambda: "500" in world.engines.readings()[0].out_of_service_reason)
            (reading,) = world.engines.readings()
            refused = await world.flush()
            await world.flusher.close()
            return reading, refused, world.engines.readings()[0]

        reading, refused, after = asyncio.run(scenario())
        assert (reading.paused, reading.up) == (True, True)
        assert reading.out_of_service_seconds > 0
        assert refused.reason.startswith("gpumond is still returning the engine to service")
        assert after.out_of_service_seconds is None


def test_return_waits_for_free_memory(tmp_path: Path):
    """A release that was answered too late has freed the memory, and another program has taken it."""
    card = device(tmp_path)
    with fake_engine("vllm", card, "late") as engine:

        async def scenario() -> None:
            world = World(card, allowed(engine))
            receipt = await world.flush()
            card.attach().allocate(9 * GIB)
            world.flusher.receipts[-1] = replace(receipt, outcome="timeout")
            world.flusher.resume_engine_restorations()
            assert await reached(
                lambda: "the engine needs 5.0 GiB" in world.engines.readings()[0].out_of_service_reason
            )
            assert "POST /wake_up" not in engine.record()["calls"]
            card.attach().free(9 * GIB)
            assert await reached(lambda: bool(world.kept))
            await world.flusher.close()

        asyncio.run(scenario())
        assert serves(engine)
        assert engine.record()["harms"] == []


def test_return_ends_with_the_server(tmp_path: Path):
    card = device(tmp_path)
    with fake_engine("vllm", card, "lie", "wake-ends") as engine:

        async def scenario() -> None:
            world = World(card, allowed(engine), timing=BRIEF)
            await world.flush()
            assert await reached(lambda: world.engines.readings()[0].out_of_service_seconds is None)
            assert world.kept == []

        asyncio.run(scenario())


def test_next_daemon_continues_the_return(tmp_path: Path):
    card = device(tmp_path)
    with fake_engine("vllm", card, "lie", "wake-fails") as engine:

        async def scenario() -> None:
            first = World(card, allowed(engine), timing=BRIEF)
            await first.flush()
            await first.flusher.close()
            assert engine.record()["paused"]
            second = World(card, allowed(engine))
            second.flusher.receipts.extend(first.flusher.receipts)
            second.flusher.resume_engine_restorations()
            assert await reached(lambda: bool(second.kept))
            await second.flusher.close()

        asyncio.run(scenario())
        assert serves(engine)


def test_useful_release_stays(tmp_path: Path):
    card = device(tmp_path)
    with fake_engine("vllm", card) as engine:

        async def scenario() -> None:
            world = World(card, allowed(engine))
            receipt = await world.flush()
            assert not has_released_too_little([receipt])
            assert world.engines.readings()[0].out_of_service_seconds is None

        asyncio.run(scenario())
        assert engine.record()["paused"]


def test_server_that_ends_during_a_wake_is_a_failure(tmp_path: Path):
    card = device(tmp_path)
    with fake_engine("vllm", card, "wake-ends") as engine:

        async def scenario() -> Receipt:
            world = World(card, allowed(engine))
            await world.flush()
            return await world.flush(wake=True)

        receipt = asyncio.run(scenario())
        assert (receipt.outcome, receipt.reason) == ("failed", "the server exited after the call; see its log")


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
        assert "the engine needs 5.0 GiB on device SIM-0" in refused.reason


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
