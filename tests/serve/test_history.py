"""HTTP API of the history."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from gpumond.diagnosis.diagnosis import Diagnosis, diagnose
from gpumond.tick.history import History
from tests.helpers.agents import GIB
from tests.helpers.values import make_device, make_process, make_snapshot
from tests.serve.application import View, ask

SECONDS = 1200
NOW = time.time()


def recorded_history() -> History:
    diagnosis = Diagnosis()
    for second in range(SECONDS):
        device = make_device(used_bytes=10 * GIB + second, processes=(make_process(10, GIB + second),))
        snapshot = make_snapshot(device, seq=second, elapsed_seconds=float(second), taken_at=NOW - SECONDS + second)
        diagnosis = diagnose(diagnosis, snapshot)
    return diagnosis.history


VIEW = View(history=recorded_history())


def query_history(**query: Any) -> Any:
    answer = ask(VIEW, "/api/v1/history", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_history_defaults_to_samples_of_15_minutes():
    body = query_history(uuid="GPU-a", pid=10)
    assert (body["device_uuid"], body["pid"], body["signal"], body["resolution_seconds"]) == ("GPU-a", 10, "used", None)
    assert len(body["points"]) == 900
    value = GIB + SECONDS - 1
    assert body["points"][-1] == {"at": pytest.approx(NOW - 1), "low": value, "median": value, "high": value}
    assert query_history(uuid="GPU-a")["points"][-1]["low"] == 10 * GIB + SECONDS - 1


def test_history_is_compressed_for_a_reader_that_accepts_it():
    plain, packed = (
        ask(VIEW, "/api/v1/history", params={"uuid": "GPU-a"}, headers={"Accept-Encoding": encoding})
        for encoding in ("identity", "gzip")
    )
    assert "content-encoding" not in plain.headers
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.headers["vary"] == plain.headers["vary"] == "Accept-Encoding"
    assert packed.content == plain.content
    assert int(packed.headers["content-length"]) < int(plain.headers["content-length"]) / 4


@pytest.mark.parametrize(
    ("ago", "resolution", "expected"),
    [(10, None, None), (1100, None, 15), (7200, None, 15), (1100, 59, 15), (1100, 60, 60)],
)
def test_resolution_is_the_shortest_sufficient_or_the_requested_one(
    ago: float, resolution: float | None, expected: int | None
):
    query = {"uuid": "GPU-a", "since": NOW - ago} | ({} if resolution is None else {"resolution": resolution})
    body = query_history(**query)
    assert body["resolution_seconds"] == expected
    points = body["points"]
    assert all(point["at"] >= NOW - ago and point["low"] <= point["median"] <= point["high"] for point in points)
    if expected == 60:
        assert all(point["high"] - point["low"] == 59 for point in points[1:-1])


@pytest.mark.parametrize(("ago", "expected"), [(900, None), (3600, 15), (7200, 60), (80_000, 900)])
def test_resolution_reaches_the_previous_day_after_a_restart(ago: float, expected: int | None):
    (device,) = (each for each in VIEW.history.coarse() if each.pid is None)
    diagnosis = Diagnosis()
    diagnosis.history.restore([replace(device, born_at=NOW - 86400)])
    for second in range(3):
        snapshot = make_snapshot(make_device(), seq=second, elapsed_seconds=float(second), taken_at=NOW - 2 + second)
        diagnosis = diagnose(diagnosis, snapshot)
    answer = ask(View(history=diagnosis.history), "/api/v1/history", params={"uuid": "GPU-a", "since": NOW - ago})
    assert answer.json()["resolution_seconds"] == expected


@pytest.mark.parametrize("resolution", [15, 60, 300, 900])
def test_last_block_is_the_incomplete_one(resolution: int):
    *closed, running = query_history(uuid="GPU-a", pid=10, resolution=resolution)["points"]
    assert running["high"] == GIB + SECONDS - 1
    assert NOW - 1 - resolution < running["at"] <= NOW - 1
    assert all(running["at"] - point["at"] >= resolution - 0.001 for point in closed)


def test_blocks_of_accelerated_time_have_their_length_on_the_clock():
    diagnosis = Diagnosis(pace=20.0)
    for second in range(400):
        snapshot = make_snapshot(make_device(), seq=second, elapsed_seconds=float(second), taken_at=NOW - 400 + second)
        diagnosis = diagnose(diagnosis, snapshot)
    view = View(history=diagnosis.history)
    answer = ask(view, "/api/v1/history", params={"uuid": "GPU-a", "since": NOW - 900}).json()
    assert (answer["resolution_seconds"], answer["block_seconds"]) == (60, 3.0)
    times = [point["at"] for point in answer["points"]]
    assert {round(later - earlier, 3) for earlier, later in pairwise(times)} == {3.0}


def test_unreported_signal_is_empty_and_unknown_process_is_404():
    assert query_history(uuid="GPU-a", pid=10, signal="live")["points"] == []
    for query, says in (
        ({"uuid": "GPU-b"}, "no device 'GPU-b'"),
        ({"uuid": "GPU-a", "pid": 11}, "no history of pid 11"),
    ):
        answer = ask(VIEW, "/api/v1/history", params=query)
        assert (answer.status_code, answer.headers["content-type"]) == (404, "application/problem+json")
        assert answer.json()["detail"].startswith(says)


def test_removed_device_is_found_by_uuid_prefix():
    assert query_history(uuid="gpu-A")["device_uuid"] == "GPU-a"


@pytest.mark.parametrize("query", [{}, {"uuid": "GPU-a", "signal": "mood"}, {"uuid": "GPU-a", "resolution": 0}])
def test_invalid_query_is_422(query: dict[str, Any]):
    assert ask(VIEW, "/api/v1/history", params=query).status_code == 422
