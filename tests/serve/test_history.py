"""HTTP API of the history."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from gpumond.diagnosis.diagnosis import Diagnosis, diagnose
from gpumond.facts.units import MIB
from gpumond.tick.history import DEVICE_SIGNAL_COUNT, History
from tests.helpers.values import GIB, make_device, make_pool, make_process, make_report, make_snapshot
from tests.serve.application import View, ask

SECONDS = 1200
NOW = time.time()


@cache
def recorded_view() -> View:
    diagnosis = Diagnosis()
    for second in range(SECONDS):
        device = make_device(used_bytes=10 * MIB + second, processes=(make_process(10, MIB + second),))
        snapshot = make_snapshot(device, seq=second, elapsed_seconds=float(second), taken_at=NOW - SECONDS + second)
        diagnosis = diagnose(diagnosis, snapshot)
    return View(history=diagnosis.history)


def query_history(**query: Any) -> Any:
    answer = ask(recorded_view(), "/api/v1/history", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_history_defaults_to_samples_of_15_minutes():
    body = query_history(uuid="GPU-a", pid=10)
    assert (body["device_uuid"], body["pid"], body["signal"], body["resolution_seconds"]) == ("GPU-a", 10, "used", None)
    assert len(body["points"]) == 900
    value = MIB + SECONDS - 1
    assert body["points"][-1] == {"at": pytest.approx(NOW - 1), "low": value, "median": value, "high": value}
    assert query_history(uuid="GPU-a")["points"][-1]["low"] == 10 * MIB + SECONDS - 1


def test_history_is_compressed_for_a_reader_that_accepts_it():
    plain, packed = (
        ask(recorded_view(), "/api/v1/history", params={"uuid": "GPU-a"}, headers={"Accept-Encoding": encoding})
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
    assert all(
        point["at"] >= NOW - ago - (expected or 0) and point["low"] <= point["median"] <= point["high"]
        for point in points
    )
    if expected == 60:
        assert all(point["high"] - point["low"] == 59 for point in points[1:-1])


@pytest.mark.parametrize(("ago", "expected"), [(900, None), (3600, 15), (7200, 60), (80_000, 900)])
def test_resolution_reaches_the_previous_day_after_a_restart(ago: float, expected: int | None):
    (device,) = (each for each in recorded_view().history.coarse_series() if each.pid is None)
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
    assert running["high"] == MIB + SECONDS - 1
    assert NOW - 1 - resolution < running["at"] <= NOW - 1
    assert all(running["at"] - point["at"] >= resolution - 0.001 for point in closed)


def test_blocks_of_accelerated_time_have_their_length_on_the_clock():
    diagnosis = Diagnosis(speedup=20.0)
    for second in range(400):
        snapshot = make_snapshot(make_device(), seq=second, elapsed_seconds=float(second), taken_at=NOW - 400 + second)
        diagnosis = diagnose(diagnosis, snapshot)
    view = View(history=diagnosis.history)
    answer = ask(view, "/api/v1/history", params={"uuid": "GPU-a", "since": NOW - 900}).json()
    assert (answer["resolution_seconds"], answer["block_seconds"]) == (None, None), "samples of 15 minutes"
    answer = ask(view, "/api/v1/history", params={"uuid": "GPU-a", "since": NOW - 900, "resolution": 60}).json()
    assert (answer["resolution_seconds"], answer["block_seconds"]) == (60, 3.0)
    times = [point["at"] for point in answer["points"]]
    assert {round(later - earlier, 3) for earlier, later in pairwise(times)} == {3.0}


def test_accelerated_time_has_a_value_each_second_for_15_minutes():
    diagnosis = Diagnosis(speedup=20.0)
    for reading in range(4600):
        at = reading / 5
        snapshot = make_snapshot(make_device(), seq=reading, elapsed_seconds=at, taken_at=NOW - 920 + at)
        diagnosis.history.advance(snapshot)
        diagnosis.history.device_series("GPU-a").add((diagnosis.history.now, *[1.0] * DEVICE_SIGNAL_COUNT))
    answer = ask(View(history=diagnosis.history), "/api/v1/history", params={"uuid": "GPU-a", "since": NOW - 900})
    times = [point["at"] for point in answer.json()["points"]]
    assert len(times) <= 901
    assert times[-1] - times[0] > 890
    assert max(later - earlier for earlier, later in pairwise(times)) < 1.1


def test_range_ends_at_until():
    points = query_history(uuid="GPU-a", since=NOW - 60, until=NOW - 30)["points"]
    assert len(points) == 30
    assert all(NOW - 60 <= point["at"] < NOW - 30 for point in points)


SHARES = ("live", "cached", "stranded", "overhead", "opaque", "unattributed")


def shared_history() -> History:
    """One program with an agent and one without on each of two devices."""
    diagnosis = Diagnosis()
    for second in range(100):
        devices = tuple(
            make_device(uuid, used_bytes=20 * GIB, processes=(make_process(10, 12 * GIB), make_process(11, 5 * GIB)))
            for uuid in ("GPU-a", "GPU-b")
        )
        pools = tuple(make_pool(uuid, live=6 * GIB, cached=3 * GIB, stranded=2 * GIB) for uuid in ("GPU-a", "GPU-b"))
        snapshot = make_snapshot(
            *devices,
            reports=(make_report(10, pools=pools),),
            seq=second,
            elapsed_seconds=float(second),
            taken_at=NOW - 100 + second,
        )
        diagnosis = diagnose(diagnosis, snapshot)
    return diagnosis.history


def test_shares_of_the_past_are_apart_and_add_up():
    view = View(history=shared_history())
    for query, expected in (
        ({"uuid": "GPU-a"}, (6, 3, 2, 1, 5, 3)),
        ({"uuid": "GPU-a", "pid": 10}, (6, 3, 2, 1, None, None)),
        ({"uuid": "GPU-a", "pid": 11}, (None, None, None, None, 5, None)),
    ):
        body = ask(view, "/api/v1/history/shares", params=query).json()
        last = {name: body[name][-1] for name in ("used", *SHARES)}
        assert [last[name] for name in SHARES] == [None if size is None else size * GIB for size in expected], query
        assert sum(last[name] or 0 for name in SHARES) == last["used"]
        assert len({len(body[name]) for name in ("at", "low", "high", "used", *SHARES)}) == 1


def test_shares_of_the_machine_are_the_sums_of_its_devices():
    history = shared_history()
    for resolution in (None, 15.0):
        (*_, last) = history.machine_shares(("GPU-a", "GPU-b"), resolution=resolution)
        assert (last.used, last.live, last.cached, last.unattributed) == (40 * GIB, 12 * GIB, 6 * GIB, 6 * GIB)
    assert history.machine_shares(()) == ()
    assert ask(View(history=history), "/api/v1/history/shares", params={"pid": 10}).status_code == 422


def test_moment_states_who_held_what_ended_programs_included():
    diagnosis = Diagnosis()
    for second in range(60):
        names = ("train", "etl") if second < 30 else ("train",)
        usages = tuple(make_process(10 + place, 5 * GIB, comm=name) for place, name in enumerate(names))
        device = make_device(used_bytes=12 * GIB, processes=usages)
        reports = (make_report(10, workload="llm", pools=(make_pool("GPU-a", live=2 * GIB, cached=GIB),)),)
        at = {"elapsed_seconds": float(second), "taken_at": NOW - 60 + second}
        diagnosis = diagnose(diagnosis, make_snapshot(device, reports=reports, seq=second, **at))
    view = View(history=diagnosis.history)

    def held(ago: float) -> dict[str, tuple[float | None, ...]]:
        body = ask(view, "/api/v1/history/moment", params={"at": NOW - ago, "uuid": "GPU-a"}).json()
        parts = ("used", "live", "cached", "opaque", "unattributed")
        return {each["name"]: tuple(each[f"{part}_bytes"] for part in parts) for each in body["holdings"]}

    assert held(40.5) == {
        "": (12 * GIB, 2 * GIB, GIB, 5 * GIB, 2 * GIB),
        "llm": (5 * GIB, 2 * GIB, GIB, None, None),
        "etl": (5 * GIB, None, None, 5 * GIB, None),
    }
    assert set(held(10)) == {"", "llm"}
    every = ask(view, "/api/v1/history/moment", params={"at": NOW - 40}).json()["holdings"]
    ended = {each["name"]: each["ended_at"] for each in every}
    assert ended == {"": None, "llm": None, "etl": pytest.approx(NOW - 30)}
    none = ask(view, "/api/v1/history/moment", params={"at": NOW - 90})
    assert (none.status_code, none.json()["detail"]) == (404, "no history for that time")


def test_unreported_signal_is_empty_and_unknown_process_is_404():
    assert query_history(uuid="GPU-a", pid=10, signal="live")["points"] == []
    for query, says in (
        ({"uuid": "GPU-b"}, "no GPU 'GPU-b'"),
        ({"uuid": "GPU-a", "pid": 11}, "no history for pid 11"),
    ):
        answer = ask(recorded_view(), "/api/v1/history", params=query)
        assert (answer.status_code, answer.headers["content-type"]) == (404, "application/problem+json")
        assert answer.json()["detail"].startswith(says)


def test_removed_device_is_found_by_uuid_prefix():
    assert query_history(uuid="gpu-A")["device_uuid"] == "GPU-a"


@pytest.mark.parametrize("query", [{}, {"uuid": "GPU-a", "signal": "mood"}, {"uuid": "GPU-a", "resolution": 0}])
def test_invalid_query_is_422(query: dict[str, Any]):
    assert ask(recorded_view(), "/api/v1/history", params=query).status_code == 422
