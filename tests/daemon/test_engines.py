"""Declared engines in a real daemon: metrics, API, reload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from gpumond.testing import GIB
from tests.engines.running import device, standin
from tests.running import RunningDaemon, until
from tests.serving import SIM


@pytest.fixture
def cards(tmp_path: Path) -> Path:
    directory = tmp_path / "cards"
    directory.mkdir()
    return directory


def start(tmp_path: Path, cards: Path, *engines: dict[str, Any], **settings: Any) -> RunningDaemon:
    config = tmp_path / "gpumond.yaml"
    config.write_text(yaml.safe_dump({"engines": list(engines), "interval": 0.2} | settings))
    return RunningDaemon(tmp_path / "daemon", *SIM, "--config", str(config), environ={"GPUMOND_SIM_DIR": str(cards)})


def test_engines_appear_in_metrics_and_api(tmp_path: Path, cards: Path):
    card = device(cards)
    with standin("vllm", card) as vllm, standin("ollama", card) as ollama, standin("sglang", card, "silent") as hung:
        daemon = start(
            tmp_path,
            cards,
            *({"name": each.kind, "kind": each.kind, "url": each.url} for each in (vllm, ollama, hung)),
        )
        try:
            labels = {"engine": "vllm", "kind": "vllm"}
            until(lambda: daemon.value("gpumond_engine_kv_cache_used_ratio", **labels) == 0.04)
            until(lambda: daemon.value("gpumond_engine_memory_used_bytes", **labels) == 7 * GIB)
            assert daemon.value("gpumond_engine_asleep", **labels) == 0
            until(lambda: daemon.value("gpumond_engine_models_loaded", engine="ollama") == 1)
            assert daemon.value("gpumond_engine_up", engine="sglang") == 0
            assert daemon.value("gpumond_engine_requests_running", engine="sglang") is None
            engines = {each["name"]: each for each in daemon.get("engines")}
            assert engines["ollama"]["levers"] == ["unload"]
            assert engines["vllm"]["levers"] == []
            assert engines["ollama"]["models"] == [{"name": "llama3:8b", "size_bytes": 4 * GIB, "pinned": False}]
        finally:
            daemon.stop()
