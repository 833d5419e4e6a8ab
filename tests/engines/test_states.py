"""State of each kind of engine, read from a fake that is a process with a port."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gpumond.facts.engines import EngineModel, EngineReading, EngineState
from gpumond.facts.errors import EngineError, EngineTimeout
from gpumond.features.engines.engine_kinds import KINDS
from gpumond.features.engines.poller import MAX_MODELS, Engines, idle_seconds, next_quiet_seconds
from gpumond.features.engines.settings import EngineConfig
from gpumond.features.engines.spec import get
from tests.engines.fake_engine import KINDS as FAKES
from tests.engines.flushing import declared
from tests.helpers.agents import GIB
from tests.helpers.engines import FakeEngine, answering, candidates, device, fake_engine
from tests.helpers.running import until

STATES: dict[str, EngineState] = {
    "ollama": EngineState(
        models=(EngineModel("llama3:8b", 4 * GIB, False, 8192),),
        held_bytes=4 * GIB,
        work=("llama3:8b 2126-11-22T10:00:00.512345678+01:00",),
    ),
    "llama-router": EngineState(
        models=(EngineModel("qwen", aliases=("qwen-alias",)),),
        running=0,
        waiting=0,
        sleeping=False,
        work=("qwen", 0.0, 0.0),
    ),
    "comfyui": EngineState(running=0, waiting=0, held_bytes=4 * GIB, work=("prompt-0",)),
    "a1111": EngineState(running=0, work=("20261122100000",)),
    "vllm": EngineState(
        models=(EngineModel("m"),),
        running=0,
        waiting=0,
        kv_cache_used_ratio=0.04,
        sleeping=False,
        paused=False,
        work=(0.0, 0.0, 0.0),
    ),
    "sglang": EngineState(
        running=0,
        waiting=2,
        kv_cache_bytes=5 * GIB // 2,
        kv_cache_used_ratio=0.1,
        held_bytes=4 * GIB,
    ),
    "tensorrt-llm": EngineState(sleeping=False),
    "lmdeploy": EngineState(running=0, waiting=0, kv_cache_used_ratio=0.25, sleeping=False),
    "triton": EngineState(models=(EngineModel("resnet"), EngineModel("pipeline")), waiting=0, work=(0.0, 0.0)),
    "generic": EngineState(models=(EngineModel("m"),), running=0, work=("0",)),
}


async def read(declaration: EngineConfig) -> EngineState:
    engines = Engines()
    engines.configure([declaration])
    return await engines.read(declaration.name)


def test_every_kind_has_a_stand_in():
    assert FAKES.keys() == KINDS.keys() == STATES.keys()


@pytest.mark.parametrize("kind", STATES)
def test_state_is_read_without_harm(kind: str, tmp_path: Path):
    with fake_engine(kind, device(tmp_path)) as engine:
        assert asyncio.run(read(declared(engine))) == STATES[kind]
        assert engine.record()["harms"] == []


@pytest.mark.parametrize("kind", sorted(STATES.keys() - {"ollama", "tensorrt-llm", "triton"}))
def test_state_counts_a_running_request(kind: str, tmp_path: Path):
    with fake_engine(kind, device(tmp_path)) as engine:
        request = engine.begin_request()
        until(lambda: engine.record()["running"] == 1)
        assert asyncio.run(read(declared(engine))).running == 1
        request.finish()


@pytest.mark.parametrize("kind", sorted(STATES.keys() - {"sglang", "tensorrt-llm", "lmdeploy"}))
def test_state_shows_that_a_request_was_served(kind: str, tmp_path: Path):
    with fake_engine(kind, device(tmp_path)) as engine:
        before = asyncio.run(read(declared(engine)))
        assert engine.begin_request().finish() == {"text": "done"}
        assert asyncio.run(read(declared(engine))).work != before.work


def test_ollama_names_pinned_models(tmp_path: Path):
    with fake_engine("ollama", device(tmp_path), "pinned") as engine:
        assert asyncio.run(read(declared(engine))).models[0].pinned


def test_sglang_without_metrics_states_its_loads(tmp_path: Path):
    with fake_engine("sglang", device(tmp_path), "no-metrics") as engine:
        assert asyncio.run(read(declared(engine))) == EngineState(
            running=0, waiting=2, kv_cache_bytes=5 * GIB // 2, kv_cache_used_ratio=0.1, held_bytes=4 * GIB
        )
        assert engine.record()["harms"] == []


def test_sglang_counts_a_request_of_all_its_schedulers_once(tmp_path: Path):
    with fake_engine("sglang", device(tmp_path), "all-schedulers") as engine:
        assert asyncio.run(read(declared(engine))) == STATES["sglang"]


def test_sglang_whose_number_of_ranks_is_unknown_states_no_sizes(tmp_path: Path):
    with fake_engine("sglang", device(tmp_path), "api-key") as engine:
        state = asyncio.run(read(declared(engine)))
        assert (state.waiting, state.kv_cache_bytes, state.held_bytes) == (2, None, None)


def test_vllm_without_statistics_is_not_up(tmp_path: Path):
    with (
        fake_engine("vllm", device(tmp_path), "no-stats") as engine,
        pytest.raises(EngineError, match="disable-log-stats"),
    ):
        asyncio.run(read(declared(engine)))


def test_vllm_that_has_released_its_kv_cache_sleeps_also_without_allow(tmp_path: Path):
    with fake_engine("vllm", device(tmp_path)) as engine:
        engine.send("/pause?mode=wait", {})
        engine.send("/release_kv_cache_memory", {})
        assert asyncio.run(read(engine.declaration())).sleeping


def test_vllm_that_is_paused_does_not_sleep(tmp_path: Path):
    with fake_engine("vllm", device(tmp_path), "paused") as engine:
        state = asyncio.run(read(declared(engine)))
        assert (state.sleeping, state.paused, state.serves) == (False, True, False)


def test_ollama_whose_model_is_past_its_time_is_busy(tmp_path: Path):
    with fake_engine("ollama", device(tmp_path), "expired") as engine:
        assert "running a request" in asyncio.run(read(declared(engine))).obstacle


def test_llama_router_without_metrics_names_the_option(tmp_path: Path):
    with fake_engine("llama-router", device(tmp_path), "no-metrics") as engine:
        state = asyncio.run(read(declared(engine)))
        assert (state.requests, state.work, state.no_counts_reason) == (None, None, "start the router with --metrics")


def test_comfyui_with_a_long_queue_is_read(tmp_path: Path):
    """The answer to /queue, with the graphs of all prompts, is larger than any answer that is read."""
    with fake_engine("comfyui", device(tmp_path)) as engine:
        asyncio.run(read(declared(engine)))
        assert "GET /queue" not in engine.record()["calls"]


def test_vllm_that_may_not_be_released_is_asked_for_metrics_only(tmp_path: Path):
    with fake_engine("vllm", device(tmp_path)) as engine:
        asyncio.run(read(engine.declaration()))
        assert engine.record()["calls"] == ["GET /metrics"]


def test_redirects_are_not_followed(tmp_path: Path):
    with fake_engine("ollama", device(tmp_path), "redirect") as engine, pytest.raises(EngineError, match="302"):
        asyncio.run(read(declared(engine)))


@pytest.mark.parametrize("kind", ["vllm", "ollama"])
def test_another_server_at_the_address_is_an_error(kind: str, tmp_path: Path):
    with fake_engine("comfyui", device(tmp_path)) as other, pytest.raises(EngineError, match="404"):
        asyncio.run(read(other.declaration(kind=kind)))


def test_generic_engine_without_a_declared_value_is_an_error(tmp_path: Path):
    with fake_engine("generic", device(tmp_path)) as engine:
        state = {"get": "/running", "running": "/requests/missing"}
        with pytest.raises(EngineError, match="no value at /requests/missing"):
            asyncio.run(read(engine.declaration(state=state)))


def test_generic_engine_states_the_size_of_its_kv_cache(tmp_path: Path):
    with fake_engine("generic", device(tmp_path)) as engine:
        assert engine.begin_request().finish() == {"text": "done"}
        state = {"get": "/running", "kv_cache_bytes": "/requests/done"}
        assert asyncio.run(read(engine.declaration(state=state))).kv_cache_bytes == 1


def test_llama_router_without_a_loaded_model_holds_nothing(tmp_path: Path):
    with fake_engine("llama-router", device(tmp_path)) as engine:
        declaration = declared(engine)
        assert asyncio.run(read(declaration)).held_bytes is None
        engine.send("/models/unload", {"model": "qwen"})
        assert until(lambda: asyncio.run(read(declaration)).held_bytes == 0)


def test_engine_on_a_unix_socket_is_read_and_owned(tmp_path: Path):
    card, path = device(tmp_path), tmp_path / "engine.sock"
    with fake_engine("ollama", card, path=path) as engine:
        engines = Engines()
        engines.configure([engine.declaration()])
        assert asyncio.run(engines.read("e")).models[0].name == "llama3:8b"
        found = asyncio.run(engines.find_processes("e", candidates(card)))
        assert {key.pid for key in found.listeners} == {engine.process.pid}
        assert len(found.processes) == 1


async def poll(
    declarations: list[EngineConfig], card: Any, done: Any, use: float | None = None
) -> tuple[EngineReading, ...]:
    """Poll the engines until ``done``. ``use``: the idle time of each process, as the driver states it."""
    engines = Engines(poll_seconds=0.05)
    engines.configure(declarations)
    engines.start(lambda: dict.fromkeys(candidates(card), use))
    while not done(engines.readings()):
        await asyncio.sleep(0.01)
    await engines.close()
    return engines.readings()


def test_poller_states_processes_and_the_idle_time(tmp_path: Path):
    card = device(tmp_path)
    with fake_engine("vllm", card) as engine:
        (found,) = asyncio.run(poll([declared(engine)], card, lambda seen: (seen[0].idle_seconds or 0) > 0.1))
        assert found.up
        assert [each.pid for each in found.processes] == [key.pid for key in candidates(card)]
        assert found.processes[0].pid != engine.process.pid  # a child of the listener holds the memory
        assert found.methods == ("kv_cache",)
        assert found.kv_cache_used_ratio == 0.04


def test_hanging_engine_delays_no_other(tmp_path: Path):
    card = device(tmp_path)
    with fake_engine("vllm", card, "silent") as hung, fake_engine("ollama", card) as engine:
        both = [hung.declaration(name="hung"), engine.declaration(name="ok")]
        readings = asyncio.run(poll(both, card, lambda seen: seen[1].up))
        assert [reading.up for reading in readings] == [False, True]
        assert readings[0].models == ()


def test_engine_that_ends_loses_its_values(tmp_path: Path):
    card = device(tmp_path)

    async def scenario(engine: FakeEngine) -> EngineReading:
        engines = Engines(poll_seconds=0.05)
        engines.configure([engine.declaration()])
        engines.start(lambda: dict.fromkeys(candidates(card)))
        while not engines.readings()[0].up:
            await asyncio.sleep(0.01)
        engine.process.kill()
        while "listen" not in engines.readings()[0].problem:  # before that, connections may be reset
            await asyncio.sleep(0.01)
        await engines.close()
        return engines.readings()[0]

    with fake_engine("ollama", card) as engine:
        lost = asyncio.run(scenario(engine))
    assert (lost.models, lost.held_bytes, lost.age_seconds) == ((), None, None)
    assert not lost.up


def test_listener_of_another_user_receives_no_request(tmp_path: Path):
    card = device(tmp_path)
    with fake_engine("ollama", card) as engine:
        declaration = engine.declaration(user="daemon")
        (found,) = asyncio.run(poll([declaration], card, lambda seen: "not to daemon" in seen[0].problem))
        assert not found.up
        assert engine.record()["calls"] == []


def test_hanging_read_ends_at_its_deadline(tmp_path: Path):
    with fake_engine("ollama", device(tmp_path), "silent") as engine:
        engines = Engines()
        declaration = engine.declaration()
        engines.configure([declaration])
        with pytest.raises(EngineTimeout, match="GET /api/ps"):
            asyncio.run(engines.carry_out("e", KINDS["ollama"].read(declaration), 0.1))


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        (EngineState(), EngineState(), 12.0),
        (EngineState(running=0), EngineState(running=1), 0.0),
        (EngineState(running=0), EngineState(running=0, obstacle="loading"), 0.0),
        (EngineState(running=0, work=(1,)), EngineState(running=0, work=(2,)), 0.0),
        (None, EngineState(running=0), 0.0),
    ],
)
def test_quiet_time_ends_with_a_sign_of_a_request(before: EngineState | None, now: EngineState, expected: float):
    assert next_quiet_seconds(before, now, 2.0, 10.0) == expected


@pytest.mark.parametrize(
    ("state", "by_driver", "expected"),
    [
        (EngineState(running=0), [], 12.0),
        (EngineState(running=0), [None], 12.0),
        (EngineState(running=0), [0.0, None], 0.0),
        (EngineState(waiting=0), [None], None),  # Triton: the running requests are not among those that wait
        (EngineState(work=("a",)), [], None),
        (EngineState(work=("a",)), [30.0, None], None),
        (EngineState(work=("a",)), [30.0], 12.0),
        (EngineState(), [5.0, 9.0], 5.0),
    ],
)
def test_idle_time_is_unknown_unless_engine_or_driver_states_it(
    state: EngineState, by_driver: list[float | None], expected: float | None
):
    assert idle_seconds(state, 12.0, by_driver) == expected


def test_ollama_is_idle_only_as_far_as_the_driver_states_it(tmp_path: Path):
    card = device(tmp_path)
    with fake_engine("ollama", card) as engine:
        request = engine.begin_request()
        until(lambda: engine.record()["running"] == 1)

        for use, expected in ((None, None), (0.0, 0.0)):
            before = engine.record()["calls"].count("GET /api/ps")

            def read_twice(seen: tuple[EngineReading, ...], before: int = before) -> bool:
                reads = engine.record()["calls"].count("GET /api/ps") - before
                return reads > 2 and seen[0].up and bool(seen[0].processes)

            (found,) = asyncio.run(poll([engine.declaration()], card, read_twice, use))
            assert found.idle_seconds == expected
        request.finish()


def test_engine_that_lists_too_many_models_is_not_read():
    engines = Engines()
    names = {f"m{number}": 1 for number in range(MAX_MODELS + 1)}
    with answering(json.dumps({"models": names}).encode()) as url:
        state = {"get": "/", "models": "/models"}
        fields = {"name": "e", "kind": "generic", "url": url, "state": state}
        engines.configure([EngineConfig.model_validate(fields)])
        with pytest.raises(EngineError, match="more than 1,000 models"):
            asyncio.run(engines.read("e"))
    assert not engines.readings()[0].up


def test_read_has_the_time_of_the_whole_exchange():
    """Ollama delays its list by 5 s while it unloads a model, and vLLM its server information at the first call."""
    assert get("/api/ps").seconds is None
