"""Serving engines in `gpumond status` and in the tables of `gpumond flush`."""

from __future__ import annotations

from typing import Any

import pytest

from gpumond.features.flush.command import plan_table, receipt_table
from gpumond.view.tables import engine_table
from tests.helpers.agents import GIB

ENGINE: dict[str, Any] = {
    "name": "chat",
    "kind": "vllm",
    "problem": "",
    "sleeping": False,
    "kv_cache_used_ratio": 0.04,
    "running": 0,
    "waiting": None,
    "idle_seconds": 920.0,
    "models": [{"name": "qwen"}],
    "processes": [{"pid": 7, "start_ticks": 100}],
}
DEVICE = {
    "uuid": "GPU-a",
    "processes": [
        {"pid": 7, "start_ticks": 100, "used_bytes": 60 * GIB},
        {"pid": 8, "start_ticks": 100, "used_bytes": GIB},
    ],
}
RECEIPT: dict[str, Any] = {
    "pid": 7,
    "workload": "chat",
    "allocator": "vllm",
    "reason": "",
    "expected": {"low": 0, "likely": 0, "high": 60 * GIB},
    "planned": None,
    "released_bytes": 40 * GIB,
    "driver_released_bytes": 40 * GIB,
    "started_at": 1_000_000.0,
    "duration_seconds": 12.0,
    "requested_by": "uid:0",
    "raced": False,
    "wake": "gpumond flush --wake",
    "wake_seconds": 7.0,
}


def test_status_lists_engines():
    lines = engine_table({"engines": [ENGINE], "devices": [DEVICE]}).splitlines()
    assert lines[1].split() == ["chat", "vllm", "up", "60.0", "GiB", "4%", "0", "-", "15", "min", "qwen"]


def test_status_states_why_an_engine_is_unknown():
    engine = ENGINE | {"problem": "nothing is listening at http://127.0.0.1:1", "models": [], "idle_seconds": None}
    assert "nothing is listening at http://127.0.0.1:1" in engine_table({"engines": [engine], "devices": [DEVICE]})


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"paused": True}, "paused"),
        ({"paused": True, "sleeping": True}, "sleeping"),
        (
            {"paused": True, "out_of_service_seconds": 75.0, "out_of_service_reason": "HTTP status 500"},
            "out of service for 1 min 15 s: HTTP status 500",
        ),
    ],
)
def test_status_states_that_an_engine_does_not_serve(fields: dict[str, Any], shown: str):
    assert shown in engine_table({"engines": [ENGINE | fields], "devices": [DEVICE]})


@pytest.mark.parametrize(("stated", "shown"), [(40 * GIB, "4% of 40.0 GiB"), (90 * GIB, "4%  "), (None, "4%  ")])
def test_status_states_the_size_of_a_kv_cache_that_the_engine_can_hold(stated: int | None, shown: str):
    table = engine_table({"engines": [ENGINE | {"kv_cache_bytes": stated}], "devices": [DEVICE]})
    assert shown in table
    assert "of 90.0 GiB" not in table


def test_status_states_why_the_memory_of_an_engine_is_unknown():
    engine = ENGINE | {"processes": [], "processes_problem": "the daemon lacks CAP_SYS_PTRACE"}
    text = engine_table({"engines": [engine], "devices": [DEVICE]})
    assert text.endswith("\nchat: its processes are unknown: the daemon lacks CAP_SYS_PTRACE")


def test_status_of_one_device_lists_the_engines_that_may_have_a_process_there():
    snapshot = {"engines": [ENGINE], "devices": [DEVICE]}
    assert engine_table(snapshot, uuid=DEVICE["uuid"]) == engine_table(snapshot)
    assert engine_table(snapshot, uuid="GPU-other") == ""
    unknown = {"engines": [ENGINE | {"processes": []}], "devices": [DEVICE]}
    assert "chat" in engine_table(unknown, uuid="GPU-other")


def test_status_without_engines_has_no_table():
    assert engine_table({"devices": [DEVICE]}) == ""


@pytest.mark.parametrize(("outcome", "shown"), [("planned", True), ("freed", True), ("refused", False)])
def test_flush_states_how_an_engine_serves_again(outcome: str, shown: bool):
    tables = plan_table([RECEIPT | {"outcome": outcome}]), receipt_table([RECEIPT | {"outcome": outcome}], {}.get)
    for text in tables:
        assert ("return to service: gpumond flush --wake (7 s the last time)" in text) == shown
