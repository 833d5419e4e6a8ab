"""Chart of the shares of a device or process."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from gpumond.facts.errors import DaemonError
from gpumond.top.screen import HistoryChart, drawn, extended, read_history
from gpumond.view.frame import key_of, view
from gpumond.view.text import plain_text
from tests.helpers.agents import GIB
from tests.helpers.frames import busy_frame


class Recorded:
    """Answers of a daemon by signal: (time, GiB). A signal without an answer is unknown."""

    url = "http://127.0.0.1:1"

    def __init__(self, **signals: list[tuple[float, float]]) -> None:
        self.signals, self.asked = signals, list[dict[str, list[str]]]()

    def get(self, path: str) -> Any:
        query = parse_qs(urlsplit(path).query)
        self.asked.append(query)
        if query["signal"][0] not in self.signals:
            raise DaemonError("nothing is known", 404)
        points = self.signals[query["signal"][0]]
        return {"points": [{"at": at, "low": 0, "median": 0, "high": size * GIB} for at, size in points]}

    def post(self, path: str, body: object, timeout: float) -> Any:
        raise NotImplementedError


CONTENT = view(busy_frame())
DEVICE, TRAIN = key_of(CONTENT.devices[0]), CONTENT.processes[0].key


def gib(live: int, held: int, other: int, unattributed: int) -> dict[str, int]:
    sizes = {"live": live, "cached": held, "overhead": other, "unattributed": unattributed}
    return {band: size * GIB for band, size in sizes.items()}


def test_bytes_are_divided_by_signal_and_sum_to_the_used_bytes():
    daemon = Recorded(used=[(1, 10), (2, 12)], live=[(1.1, 4), (2, 5)], held=[(1, 7), (2, 7)], unattributed=[(2, 1)])
    past = read_history(daemon, "GPU-own", DEVICE, 600)
    assert past.points == ((1.0, gib(4, 3, 3, 0)), (2.0, gib(5, 2, 4, 1)))
    assert {query["uuid"][0] for query in daemon.asked} == {"GPU-own"}


def test_bytes_of_a_process_without_an_agent_are_other_bytes():
    daemon = Recorded(used=[(1, 10)])
    assert read_history(daemon, "GPU-a", TRAIN, 600).points == ((1.0, gib(0, 0, 10, 0)),)
    assert {query["pid"][0] for query in daemon.asked} == {"10"}


def test_history_without_points_is_empty():
    assert read_history(Recorded(), "GPU-a", DEVICE, 600).points == ()
    (line,) = drawn(HistoryChart(DEVICE, 600, ()), "GPU 0 ", 80, 2, True)
    assert plain_text(line) == "GPU 0 no history yet"


@pytest.mark.parametrize(("of", "bands"), [(DEVICE, gib(20, 18, 12, 0)), (TRAIN, gib(20, 18, 2, 0))])
def test_each_frame_extends_the_history(of: Any, bands: dict[str, int]):
    past = HistoryChart(of, 999_990.0, ((999_000.0, gib(1, 0, 0, 0)), (999_990.0, gib(1, 1, 1, 0))))
    longer = extended(past, CONTENT)
    assert longer.points == ((999_990.0, gib(1, 1, 1, 0)), (1_000_000.0, bands))
    assert longer.until == 1_000_000.0
    assert extended(longer, CONTENT) is longer


def test_chart_is_stacked_and_colored_by_share():
    past = HistoryChart(DEVICE, 600.0, tuple((float(at), gib(8, 4, 4, 0)) for at in range(0, 601, 10)))
    head, top, bottom = drawn(past, "", 60, 2, False)
    assert plain_text(head).startswith("used in the last 10 min: 16.0 GiB to 16.0 GiB")
    assert {(piece.text[0], piece.ink, piece.ground) for piece in bottom} == {("█", "live", "")}
    assert {(piece.text[0], piece.ink, piece.ground) for piece in top} == {("▄", "cached", "overhead")}
    head, top, bottom = drawn(past, "", 60, 2, True)
    assert [piece.text for piece in (*top, *bottom)] == ["█" * 60] * 2
