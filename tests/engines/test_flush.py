"""The flush step ``engine`` on fakes of all kinds: plan, checks, release, proof and wake."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gpumond.facts.errors import NoSuchTarget
from gpumond.facts.flush import FlushRequest, Target
from gpumond.facts.pools import ExpectedRelease
from gpumond.features.engines.engine_kinds import KINDS
from gpumond.features.engines.flush_step import EngineFlusher, ReleaseTiming
from tests.engines.flushing import ALLOWED, BRIEF, FAST, Short, World, allowed, flush
from tests.helpers.agents import GIB
from tests.helpers.engines import device, fake_engine, used_bytes
from tests.helpers.running import until

RELEASED = {"ollama": 4 * GIB, "llama-router": 4 * GIB, "vllm": 4 * GIB}
"""Bytes that a fake releases; 3 GiB if its own process holds the memory."""

GONE = ("ollama", "llama-router")
"""Kinds whose release cuts running requests."""


def test_every_kind_with_a_method_is_tested():
    assert ALLOWED.keys() == {kind for kind, spec in KINDS.items() if not spec.no_methods_reason}


@pytest.mark.parametrize("kind", ALLOWED)
def test_release_is_proved_by_the_driver(kind: str, tmp_path: Path):
    card = device(tmp_path)
    with fake_engine(kind, card) as engine:
        before = used_bytes(card)
        receipt = flush(card, allowed(engine))
        released = RELEASED.get(kind, 3 * GIB)
        assert receipt.outcome == ("gone" if kind in GONE else "partial" if kind == "comfyui" else "freed")
        assert receipt.reason == (
            "released 3.0 GiB of the expected 4.0 GiB (driver-reported)" if kind == "comfyui" else ""
        )
        assert receipt.driver_released_bytes == receipt.released_bytes == released == before - used_bytes(card)
        assert receipt.workload == "e"
        assert receipt.allocator == kind
        assert receipt.pid == engine.process.pid
        assert receipt.before
        assert receipt.before.driver_used_bytes == before
        assert receipt.wake
        assert [step.step for step in receipt.steps] == ["engine"]
        assert engine.record()["harms"] == []


@pytest.mark.parametrize("kind", ALLOWED)
def test_plan_changes_nothing_and_states_how_the_engine_serves_again(kind: str, tmp_path: Path):
    card = device(tmp_path)
    with fake_engine(kind, card) as engine:
        before = used_bytes(card)
        receipt = flush(card, allowed(engine), dry_run=True)
        assert receipt.outcome == "planned"
        assert receipt.expected
        assert receipt.expected.low <= RELEASED.get(kind, 3 * GIB) <= receipt.expected.high == before
        assert receipt.wake
        assert receipt.method
        assert used_bytes(card) == before
        posts = [call for call in engine.record()["calls"] if call.startswith("POST")]
        assert posts in ([], ["POST /v2/repository/index"])


@pytest.mark.parametrize("kind", sorted(ALLOWED.keys() - {"ollama", "tensorrt-llm", "triton"}))
def test_busy_engine_is_refused_and_loses_no_request(kind: str, tmp_path: Path):
    card = device(tmp_path)
    with fake_engine(kind, card) as engine:
        before = used_bytes(card)
        request = engine.begin_request()
        until(lambda: engine.record()["running"] == 1)
        receipt = flush(card, allowed(engine))
        assert (receipt.outcome, receipt.reason) == ("refused", "1 request running, 0 queued")
        assert used_bytes(card) == before
        assert request.finish() == {"text": "done"}
        assert engine.record()["harms"] == []


@pytest.mark.parametrize("kind", ["ollama", "tensorrt-llm", "triton"])
def test_engine_that_waits_completes_the_request_before_it_releases(kind: str, tmp_path: Path):
    card = device(tmp_path)
    with fake_engine(kind, card) as engine:
        before = used_bytes(card)

        async def scenario() -> Any:
            world = World(card, allowed(engine))
            request = engine.begin_request()
            while engine.record()["running"] == 0:
                await asyncio.sleep(0.01)
            flushing = asyncio.create_task(world.flush())
            path = {"ollama": "/api/generate", "tensorrt-llm": "/release_memory", "triton": "/unload"}[kind]
            while not any(path in call for call in (await asyncio.to_thread(engine.record))["calls"]):
                await asyncio.sleep(0.01)
            assert used_bytes(card) == before  # not before the request is complete
            return await asyncio.to_thread(request.finish), await flushing

        answer, receipt = asyncio.run(scenario())
        assert answer == {"text": "done"}
        assert receipt.outcome in ("freed", "gone")
        assert engine.record()["harms"] == []


@pytest.mark.parametrize("kind", sorted(ALLOWED.keys() - {"tensorrt-llm"}))
def test_request_during_the_check_is_not_lost(kind: str, tmp_path: Path):
    """A request arrives and ends between two reads: the counters have grown, and nothing is released."""
    card = device(tmp_path)
    with fake_engine(kind, card) as engine:
        before = used_bytes(card)

        async def scenario() -> Any:
            world = World(card, allowed(engine), timing=ReleaseTiming(idle_seconds=2.0))
            flushing = asyncio.create_task(world.flush())
            while not (await asyncio.to_thread(engine.record))["calls"]:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.5)
            answer = await asyncio.to_thread(engine.begin_request().finish)
            return answer, await flushing

        answer, receipt = asyncio.run(scenario())
        assert answer == {"text": "done"}
        if kind == "lmdeploy":  # its counters are optional: the engine is idle again
            assert receipt.outcome in ("freed", "refused")
        else:
            assert (receipt.outcome, receipt.reason) == ("refused", "the engine served a request during the check")
            assert used_bytes(card) == before
        assert engine.record()["harms"] == []


@pytest.mark.parametrize("kind", ALLOWED)
def test_answer_without_effect_is_nothing(kind: str, tmp_path: Path):
    card = device(tmp_path)
    with fake_engine(kind, card, "lie") as engine:
        receipt = asyncio.run(World(card, allowed(engine), timing=BRIEF).flush())
        assert receipt.outcome == "nothing"
        assert "the driver still counts" in receipt.reason
        assert receipt.driver_released_bytes == receipt.released_bytes == 0


@pytest.mark.parametrize("kind", ALLOWED)
def test_answer_before_anything_is_free_is_awaited(kind: str, tmp_path: Path):
    card = device(tmp_path)
    with fake_engine(kind, card, "late") as engine:
        receipt = flush(card, allowed(engine))
        assert receipt.outcome in ("freed", "gone", "partial")
        assert receipt.driver_released_bytes == RELEASED.get(kind, 3 * GIB)


@pytest.mark.parametrize("kind", ALLOWED)
def test_server_that_ends_is_a_failure(kind: str, tmp_path: Path):
    card = device(tmp_path)
    with fake_engine(kind, card, "die") as engine:
        receipt = flush(card, allowed(engine))
        assert receipt.outcome == "failed"
        assert "the server exited after the call" in receipt.reason


@pytest.mark.parametrize("kind", sorted(ALLOWED.keys() - {"comfyui", "triton"}))
def test_call_that_hangs_is_not_repeated(kind: str, tmp_path: Path):
    card = device(tmp_path)
    with fake_engine(kind, card, "hang") as engine:

        async def scenario() -> Any:
            world = Short(card, allowed(engine, wake=False))  # a completed return to service allows the next release
            return await world.flush(), await world.flush()

        first, second = asyncio.run(scenario())
        assert first.outcome == "timeout"
        assert "no response to POST" in first.reason
        assert second.outcome == "refused", (first, second)
        assert second.reason.startswith("the last release got no response")
        calls = engine.record()["calls"]
        assert len(calls) == len(set(calls) | {call for call in calls if call.startswith("GET")}) or all(
            calls.count(call) == 1 for call in calls if call.startswith("POST") and "index" not in call
        )


def test_call_that_hangs_is_not_repeated_while_the_server_still_serves(tmp_path: Path):
    card = device(tmp_path)
    with fake_engine("generic", card, "hang") as engine:

        async def scenario() -> Any:
            world = Short(card, allowed(engine))
            first = await world.flush()
            await asyncio.sleep(0.5)  # its return to service finds that it serves, because the release has not begun
            return first, await world.flush()

        first, second = asyncio.run(scenario())
        assert (first.outcome, second.outcome) == ("timeout", "refused")
        assert engine.record()["calls"].count("POST /unload") == 1


@pytest.mark.parametrize(
    ("kind", "fault", "says"),
    [
        ("vllm", "no-dev-mode", "VLLM_SERVER_DEV_MODE=1"),
        ("vllm", "no-sleep-mode", "start vLLM with --enable-sleep-mode"),
        ("llama-router", "loading", "qwen: being loaded"),
        ("llama-router", "no-metrics", "the engine doesn't report them (start the router with --metrics)"),
        ("ollama", "pinned", "llama3:8b: pinned with keep_alive"),
        ("ollama", "expired", "running a request or being unloaded"),
        ("vllm", "no-stats", "start vLLM without --disable-log-stats"),
        ("tensorrt-llm", "failed", "restart the engine"),
        ("triton", "ensemble", "the ensemble pipeline uses resnet"),
        ("triton", "not-explicit", "HTTP status 400"),
    ],
)
def test_engine_that_must_not_be_released_is_refused(kind: str, fault: str, says: str, tmp_path: Path):
    card = device(tmp_path)
    with fake_engine(kind, card, fault) as engine:
        before = used_bytes(card)
        use = None if fault == "no-metrics" else 0.0
        receipt = asyncio.run(World(card, allowed(engine), use=use).flush())
        assert receipt.outcome == "refused"
        assert says in receipt.reason
        assert used_bytes(card) == before
        assert not engine.record()["paused"]


@pytest.mark.parametrize("kind", ALLOWED)
def test_engine_whose_processes_use_the_device_is_refused(kind: str, tmp_path: Path):
    """The driver is the second witness: also of an engine that states no request."""
    card = device(tmp_path)
    with fake_engine(kind, card) as engine:
        receipt = asyncio.run(World(card, allowed(engine), use=0.4).flush())
        assert (receipt.outcome, receipt.reason) == (
            "refused",
            "the engine's processes use the GPU (40%): a request may be running",
        )


@pytest.mark.parametrize(("kind", "outcome"), [("tensorrt-llm", "refused"), ("triton", "refused"), ("ollama", "gone")])
def test_unknown_requests_are_busy_unless_the_engine_serves_on(kind: str, outcome: str, tmp_path: Path):
    card = device(tmp_path)
    with fake_engine(kind, card) as engine:
        receipt = asyncio.run(World(card, allowed(engine), use=None).flush())
        assert receipt.outcome == outcome
        assert (
            "can't tell whether requests are running: the engine doesn't report them, and the driver" in receipt.reason
        ) == (outcome == "refused")


def test_server_that_somebody_else_has_paused_is_refused(tmp_path: Path):
    card = device(tmp_path)
    with fake_engine("vllm", card, "paused") as engine:
        receipt = flush(card, allowed(engine))
        assert (receipt.outcome, receipt.reason) == (
            "refused",
            "the engine is paused, but not by gpumond: resume it first",
        )
        assert engine.record()["paused"]


def test_llama_models_that_sleep_return_their_contexts(tmp_path: Path):
    card = device(tmp_path)
    with fake_engine("llama-router", card, "sleeping") as engine:
        assert flush(card, allowed(engine)).outcome == "gone"


def test_llama_model_is_named_by_its_alias(tmp_path: Path):
    card = device(tmp_path)
    with fake_engine("llama-router", card) as engine:
        assert flush(card, allowed(engine, models=["qwen-alias"])).models == ("qwen",)


def test_plan_expects_what_the_last_release_returned(tmp_path: Path):
    card = device(tmp_path)
    with fake_engine("vllm", card) as engine:

        async def scenario() -> Any:
            world = World(card, allowed(engine))
            first = await world.flush()
            await world.flush(wake=True)
            return first, await world.flush(dry_run=True)

        first, planned = asyncio.run(scenario())
        assert first.expected == ExpectedRelease(0, None, 7 * GIB, "interval")
        assert planned.expected == ExpectedRelease(0, 4 * GIB, 7 * GIB, "interval")


def test_another_users_request_is_refused_by_the_fresh_look_at_the_listener(tmp_path: Path):
    card = device(tmp_path)
    with fake_engine("vllm", card) as engine:

        async def scenario() -> Any:
            world = World(card, allowed(engine))
            step = EngineFlusher(world.engines, world.read_driver, FAST)
            request = FlushRequest(target=Target(workload="e", uid=os.getuid() + 1), steps=("engine",))
            return await step.flush("e", request, "test")

        (receipt,) = asyncio.run(scenario())
        assert (receipt.outcome, receipt.reason) == (
            "refused",
            f"the engine's listener doesn't belong to uid {os.getuid() + 1}",
        )
        assert engine.record()["calls"] == []


def test_pinned_model_that_is_declared_is_unloaded(tmp_path: Path):
    card = device(tmp_path)
    with fake_engine("ollama", card, "pinned") as engine:
        assert flush(card, allowed(engine, models=["llama3:8b"])).outcome == "gone"


@pytest.mark.parametrize("kind", ["vllm", "triton", "a1111", "tensorrt-llm", "lmdeploy", "sglang", "generic"])
def test_kind_with_a_risk_is_refused_without_allow(kind: str, tmp_path: Path):
    card = device(tmp_path)
    with fake_engine(kind, card) as engine:
        fields: dict[str, Any] = (
            {"state": {"get": "/running", "running": "/requests/active"}} if kind == "generic" else {}
        )
        receipt = flush(card, engine.declaration(**fields))
        assert receipt.outcome == "refused"
        assert ("add allow: [engine]" in receipt.reason) == (kind != "sglang")
        assert engine.record()["calls"] == []


def test_proxy_that_holds_no_memory_is_refused(tmp_path: Path):
    card = device(tmp_path)
    program = "import http.server as h; s = h.HTTPServer(('127.0.0.1', 0), h.BaseHTTPRequestHandler); "
    program += "print(s.server_port, flush=True); s.serve_forever()"
    with (
        fake_engine("ollama", card) as engine,
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as proxy,
    ):
        assert proxy.stdout
        url = f"http://127.0.0.1:{int(proxy.stdout.readline())}"
        receipt = flush(card, allowed(engine, url=url))
        proxy.kill()
        assert (receipt.outcome, "a proxy listens at the address" in receipt.reason) == ("refused", True)
        assert engine.record()["calls"] == []


def test_host_memory_must_fit(tmp_path: Path):
    size_gib = (os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30) + 4
    card = device(tmp_path, size_gib + 16)
    card.attach()
    with fake_engine("comfyui", card) as engine:

        class Full(World):
            """World on a machine without free memory."""

            def __init__(self) -> None:
                super().__init__(card, allowed(engine))
                (tmp_path / "proc").mkdir()
                (tmp_path / "proc" / "meminfo").write_text("MemAvailable: 1048576 kB\n")

        from gpumond.host.machine import available_bytes

        world = Full()
        available = available_bytes([], str(tmp_path / "proc"))
        assert available == GIB

        async def little(processes: Any) -> int | None:
            return available

        world.engines.available_host_bytes = little  # type: ignore[method-assign]
        receipt = asyncio.run(world.flush())
        assert receipt.outcome == "refused"
        assert "up to 4.0 GiB moves to the host, where 1.0 GiB is available" in receipt.reason


def test_engine_that_sleeps_already_is_nothing(tmp_path: Path):
    card = device(tmp_path)
    with fake_engine("vllm", card) as engine:

        async def scenario() -> Any:
            world = World(card, allowed(engine))
            return await world.flush(), await world.flush()

        first, second = asyncio.run(scenario())
        assert first.outcome == "freed"
        assert (second.outcome, second.reason) == ("nothing", "the engine is already sleeping")


def test_sleep_method_releases_the_weights_too(tmp_path: Path):
    card = device(tmp_path)
    with fake_engine("vllm", card) as engine:
        receipt = flush(card, allowed(engine, method="sleep"))
        assert (receipt.outcome, receipt.driver_released_bytes, receipt.method) == ("freed", 6 * GIB, "sleep")
        assert receipt.expected == ExpectedRelease(0, 6 * GIB, 7 * GIB, "interval")
        assert engine.record()["harms"] == []


def test_one_method_at_a_time(tmp_path: Path):
    card = device(tmp_path)
    with fake_engine("vllm", card) as engine:

        async def scenario() -> Any:
            world = World(card, allowed(engine), allowed(engine, name="same"))
            return await asyncio.gather(world.flush(), world.flush(), world.flush("same"))

        receipts = asyncio.run(scenario())
        refused = ("refused", "another flush is in progress; wait for its receipt")
        assert sorted((each.outcome, each.reason) for each in receipts if each.outcome != "freed") == [refused, refused]
        assert engine.record()["harms"] == []


def test_targets_select_engines(tmp_path: Path):
    card = device(tmp_path)
    with fake_engine("vllm", card) as engine:

        async def scenario() -> Any:
            world = World(card, allowed(engine))
            await world.engines.find_processes("e", card.read().processes_by_key)
            (pid,) = (key.pid for key in card.read().processes_by_key)
            found = []
            for target in (
                Target(pid=pid),
                Target(device="SIM-0"),
                Target(all=True),
                Target(workload="e", uid=os.getuid()),
            ):
                request = FlushRequest(target=target, steps=("engine",), dry_run=True)
                found.append((await world.flusher.flush(request, "test")).receipts[0].outcome)
            for target in (Target(pid=1), Target(workload="x"), Target(all=True, uid=12345)):
                with pytest.raises(NoSuchTarget, match="no configured serving engine matches"):
                    await world.flusher.flush(FlushRequest(target=target, steps=("engine",)), "test")
            with pytest.raises(NoSuchTarget, match="no program with an agent"):
                await world.flusher.flush(FlushRequest(target=Target(workload="e")), "test")
            return found

        assert asyncio.run(scenario()) == ["planned"] * 4


def test_idle_check_takes_its_time(tmp_path: Path):
    card = device(tmp_path)
    with fake_engine("comfyui", card) as engine:
        began = time.monotonic()
        asyncio.run(World(card, allowed(engine), timing=ReleaseTiming(idle_seconds=1.0, settle_seconds=3.0)).flush())
        assert time.monotonic() - began >= 1.0
        reads = [call for call in engine.record()["calls"] if call == "GET /prompt"]
        assert len(reads) == FAST.reads
