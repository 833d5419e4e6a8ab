"""Declared engines in a real daemon: metrics, API, reload."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.agents import GIB
from tests.helpers.engines import device, fake_engine, used_bytes
from tests.helpers.running import RunningDaemon, until as until_in
from tests.helpers.serving import SIM

UNUSED_KV_CACHE = {
    "name": "unused-kv-cache",
    "scope": "engine",
    "value": "kv_cache_idle_used_bytes",
    "above": "6GiB",
    "match": {"kind": "vllm"},
    "annotations": {"summary": "{engine} ({kind}) holds {used} while {kv_cache} is in use"},
}


@pytest.fixture
def cards(tmp_path: Path) -> Path:
    directory = tmp_path / "cards"
    directory.mkdir()
    return directory


def until(condition: Callable[[], Any]) -> Any:
    """Wait for a condition that depends on a read of an engine, of which there is one every ten seconds."""
    return until_in(condition, 60)


def start(tmp_path: Path, cards: Path, *engines: dict[str, Any], **settings: Any) -> RunningDaemon:
    config = tmp_path / "gpumond.yaml"
    config.write_text(yaml.safe_dump({"engines": list(engines), "interval": 0.2} | settings))
    return RunningDaemon(tmp_path / "daemon", *SIM, "--config", str(config), environ={"GPUMOND_SIM_DIR": str(cards)})


def test_engines_appear_in_metrics_and_api(tmp_path: Path, cards: Path):
    card = device(cards)
    with (
        fake_engine("vllm", card) as vllm,
        fake_engine("ollama", card) as ollama,
        fake_engine("sglang", card, "silent") as hung,
        start(
            tmp_path,
            cards,
            *({"name": each.kind, "kind": each.kind, "url": each.url} for each in (vllm, ollama, hung)),
            rules=[UNUSED_KV_CACHE],
        ) as daemon,
    ):
        labels = {"engine": "vllm", "kind": "vllm"}
        until(lambda: daemon.value("gpumond_engine_kv_cache_used_ratio", **labels) == 0.04)
        until(lambda: daemon.value("gpumond_engine_memory_used_bytes", **labels) == 7 * GIB)
        assert daemon.value("gpumond_engine_sleeping", **labels) == 0
        until(lambda: daemon.value("gpumond_engine_models_loaded", engine="ollama") == 1)
        name = UNUSED_KV_CACHE["name"]
        (alert,) = until(lambda: [each for each in daemon.get("alerts") if each["rule"] == name])
        assert dict(alert["annotations"])["summary"] == "vllm (vllm) holds 7.0 GiB while 4% is in use"
        assert "4%" in daemon.run("status").stdout
        until(lambda: daemon.value("gpumond_engine_up", engine="sglang") == 0)
        assert daemon.value("gpumond_engine_requests_running", engine="sglang") is None
        engines = {each["name"]: each for each in daemon.get("engines")}
        assert engines["ollama"]["methods"] == ["unload"]
        assert engines["vllm"]["methods"] == []
        (model,) = engines["ollama"]["models"]
        assert (model["name"], model["size_bytes"], model["context_length"]) == ("llama3:8b", 4 * GIB, 8192)
        assert engines["ollama"]["idle_seconds"] is None  # neither Ollama nor this driver states its use


def test_flush_and_wake_after_a_restart_of_the_daemon(tmp_path: Path, cards: Path):
    card = device(cards)
    with fake_engine("vllm", card) as engine:
        own = {"name": "chat", "kind": "vllm", "url": engine.url, "allow": ["engine"]}
        with start(tmp_path, cards, own) as daemon:
            until(lambda: daemon.value("gpumond_engine_memory_used_bytes", engine="chat") == 7 * GIB)
            plan = daemon.run("flush", "--workload", "chat", "--step", "engine", "--dry-run")
            assert (plan.returncode, "return to service: gpumond flush --workload chat" in plan.stdout) == (0, True)
            flushed = daemon.run("flush", "--workload", "chat", "--step", "engine")
            assert (flushed.returncode, "4.0 GiB released" in flushed.stdout) == (0, True), flushed.stdout
            assert used_bytes(card) == 3 * GIB
            until(lambda: daemon.value("gpumond_flushes_total", outcome="freed") == 1)
        with start(tmp_path, cards, own) as daemon:
            until(lambda: daemon.value("gpumond_engine_sleeping", engine="chat") == 1)
            assert "sleeping" in daemon.run("status").stdout
            woken = daemon.run("flush", "--workload", "chat", "--step", "engine", "--wake")
            assert (woken.returncode, "woken" in woken.stdout) == (0, True), woken.stdout
            assert used_bytes(card) == 7 * GIB
            again = daemon.run("flush", "--workload", "chat", "--step", "engine", "--wake")
            assert again.returncode == 3
            assert engine.record()["harms"] == []


def test_rule_releases_an_idle_engine_and_the_server_keeps_running(tmp_path: Path, cards: Path):
    card = device(cards)
    rule = {
        "name": "idle-engines",
        "scope": "device",
        "value": "used_bytes",
        "above": "1GiB",
        "action": {"flush": {"steps": ["engine"], "only_idle_for": "5s"}, "cooldown": "10m"},
    }
    with fake_engine("llama-router", card) as engine:
        own = {"name": "chat", "kind": "llama-router", "url": engine.url}
        with start(tmp_path, cards, own, rules=[rule]) as daemon:
            until(lambda: used_bytes(card) == 0)
            receipt = until(lambda: daemon.get("receipts"))[0]
            assert (receipt["outcome"], receipt["requested_by"]) == ("gone", "rule:idle-engines")
            assert receipt["driver_released_bytes"] == 4 * GIB
            assert engine.begin_request().finish() == {"text": "done"}


def test_steps_of_programs_leave_engines_alone(tmp_path: Path, cards: Path):
    with (
        fake_engine("ollama", device(cards)) as engine,
        start(tmp_path, cards, {"name": "chat", "kind": "ollama", "url": engine.url}) as daemon,
    ):
        until(lambda: daemon.value("gpumond_engine_up", engine="chat") == 1)
        assert daemon.flush(target={"workload": "chat"})[0] == 404
        assert daemon.flush(target={"all": True}, steps=["cache"], wake=True)[0] == 422
        assert not [call for call in engine.record()["calls"] if "generate" in call]


def test_server_that_does_not_serve_after_a_release_is_an_alert(tmp_path: Path, cards: Path):
    with fake_engine("vllm", device(cards), "rejects", *["wake-fails"] * 3) as engine:
        own = {"name": "chat", "kind": "vllm", "url": engine.url, "allow": ["engine"]}
        with start(tmp_path, cards, own, rule_overrides={"engine-out-of-service": {"threshold": 1}}) as daemon:
            until(lambda: daemon.value("gpumond_engine_memory_used_bytes", engine="chat") == 7 * GIB)
            daemon.run("flush", "--workload", "chat", "--step", "engine")
            (alert,) = until(lambda: [each for each in daemon.get("alerts") if each["rule"] == "engine-out-of-service"])
            assert "chat (vllm) has been out of service for" in dict(alert["annotations"])["summary"]
            assert "out of service" in daemon.run("status").stdout
            until(lambda: not [each for each in daemon.get("alerts") if each["rule"] == "engine-out-of-service"])
            assert [each["outcome"] for each in daemon.get("receipts")] == ["refused", "woken"]
            assert "engine.returned" in [each["action"] for each in daemon.get("audit")]
            assert engine.begin_request().finish() == {"text": "done"}
