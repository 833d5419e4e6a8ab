"""Chart of the shares of a device or process."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from gpumond.facts.errors import DaemonError
from gpumond.facts.shares import SHARES
from gpumond.top.screen import HistoryChart, SensorHistory, chart_lines, extend_history, read_history, read_utilization
from gpumond.view.frame import FrameView, frame_view, history_key_of
from gpumond.view.text import plain_text, width_of
from tests.helpers.agents import GIB
from tests.helpers.frames import busy_frame


class Recorded:
    """Answer of a daemon: columns by name, sizes in GiB."""

    url = "http://127.0.0.1:1"

    def __init__(self, at: list[float] | None = None, **shares: list[float | None]) -> None:
        self.at, self.shares, self.asked = at, shares, list[dict[str, list[str]]]()

    def get(self, path: str) -> Any:
        self.asked.append(parse_qs(urlsplit(path).query))
        if self.at is None:
            raise DaemonError("nothing is known", 404)
        columns = {share: self.shares.get(share, [None] * len(self.at)) for share in SHARES}
        return {"at": self.at} | {
            share: [None if size is None else size * GIB for size in sizes] for share, sizes in columns.items()
        }

    def post(self, path: str, body: object, timeout: float) -> Any:
        raise NotImplementedError


CONTENT = frame_view(busy_frame())
DEVICE, TRAIN = history_key_of(CONTENT.devices[0]), CONTENT.processes[0].key


def gib(live: int = 0, cached: int = 0, stranded: int = 0, overhead: int = 0, opaque: int = 0) -> dict[str, int]:
    sizes = zip(SHARES, (live, cached, stranded, overhead, opaque, 0), strict=True)
    return {share: size * GIB for share, size in sizes}


def test_shares_of_the_past_are_apart():
    daemon = Recorded([1, 2], live=[4, 5], cached=[3, 2], stranded=[1, None], overhead=[2, 2], opaque=[None, 1])
    past = read_history(daemon, "GPU-own", DEVICE, 600)
    assert past.points == ((1.0, gib(4, 3, 1, 2)), (2.0, gib(5, 2, 0, 2, 1)))
    assert [query["uuid"] for query in daemon.asked] == [["GPU-own"]]


def test_history_of_a_process_names_its_life():
    daemon = Recorded([1], opaque=[10])
    assert read_history(daemon, "GPU-a", TRAIN, 600).points == ((1.0, gib(opaque=10)),)
    assert {query["pid"][0] for query in daemon.asked} == {"10"}


def test_history_without_points_is_empty():
    assert read_history(Recorded(), "GPU-a", DEVICE, 600).points == ()
    (line,) = chart_lines(HistoryChart(DEVICE, 600, ()), "GPU 0 ", 80, 2, True)
    assert plain_text(line) == "GPU 0 no history yet"


@pytest.mark.parametrize(("of", "bands"), [(DEVICE, gib(20, 12, 6, 2, 10)), (TRAIN, gib(20, 12, 6, 2))])
def test_each_frame_extends_the_history(of: Any, bands: dict[str, int]):
    past = HistoryChart(of, 999_990.0, ((999_000.0, gib(1)), (999_990.0, gib(1, 1, 1))))
    longer = extend_history(past, CONTENT)
    assert longer.points == ((999_990.0, gib(1, 1, 1)), (1_000_000.0, bands))
    assert longer.until == 1_000_000.0
    assert extend_history(longer, CONTENT) is longer


def test_chart_is_stacked_and_colored_by_share():
    past = HistoryChart(DEVICE, 600.0, tuple((float(at), gib(8, 4, 0, 4)) for at in range(0, 601, 10)))
    head, top, bottom = chart_lines(past, "", 60, 2, False)
    assert plain_text(head).startswith("used in the last 10 min: 16.0 GiB  ")
    assert {(piece.text[0], piece.foreground, piece.background) for piece in bottom[1:]} == {("█", "live", "")}
    assert {(piece.text[0], piece.foreground, piece.background) for piece in top[1:]} == {("▄", "cached", "overhead")}
    head, top, bottom = chart_lines(past, "", 60, 2, True)
    assert [plain_text(line) for line in (top, bottom)] == [f"  16.0 GiB {'█' * 49}", f"         0 {'█' * 49}"]


def test_large_chart_has_its_times():
    past = HistoryChart(DEVICE, 3600.0, tuple((float(at), gib(8)) for at in range(3000, 3601, 10)))
    *_, last, times = chart_lines(past, "", 60, 4, True)
    assert plain_text(last) == f"         0 {'█' * 49}"
    assert plain_text(times) == "           00:50:00 UTC                         01:00:00 UTC"
    for width in range(12, 50):
        assert max(map(width_of, chart_lines(past, "", width, 4, True))) <= width


def test_busy_and_power_of_a_device_are_curves_once_they_are_known_twice():
    def at(seconds: float, busy: float | None, watts: float | None) -> FrameView:
        device = replace(CONTENT.devices[0], busy_ratio=busy, watts=watts)
        return replace(CONTENT, taken_at=seconds, devices=(device,))

    sensors = SensorHistory()
    sensors.add(at(0, 0.5, None))
    sensors.add(at(0, 0.5, None))
    assert sensors.lines("GPU-a", 80) == []
    assert sensors.unread == ["GPU-a"]
    sensors.add(at(1, 1.0, None))
    (line,) = sensors.lines("GPU-a", 60)
    text = plain_text(line)
    assert text.startswith("last 1 s: busy up to 100% ▄")
    assert text.endswith("█")
    for second in range(2, 800):
        sensors.add(at(second, 0.25, 300.0))
    (line,) = sensors.lines("GPU-a", 80)
    assert plain_text(line).startswith("last 10 min: busy up to 25% ▂▂"), "older values are gone"
    assert "  power up to 300 W ██" in plain_text(line)
    assert width_of(line) <= 80


def test_utilization_before_the_first_frame_is_that_of_the_daemon():
    class Known:
        url = "http://127.0.0.1:1"

        def get(self, path: str) -> Any:
            assert parse_qs(urlsplit(path).query)["signal"] == ["utilization"]
            return {"points": [{"at": 10.0 * step, "median": 0.75} for step in range(60)]}

        def post(self, path: str, body: object, timeout: float) -> Any:
            raise NotImplementedError

    sensors = SensorHistory()
    device = replace(CONTENT.devices[0], busy_ratio=0.25, watts=300.0)
    sensors.add(replace(CONTENT, taken_at=599.0, devices=(device,)))
    sensors.add(replace(CONTENT, taken_at=600.0, devices=(device,)))
    sensors.prepend("GPU-a", read_utilization(Known(), "GPU-a", 600.0))
    (line,) = sensors.lines("GPU-a", 100)
    text = plain_text(line)
    assert text.startswith("last 10 min: busy up to 75% ▆▆▆")
    assert re.search("  power up to 300 W {9,}█ *$", text), "the daemon keeps no power"
