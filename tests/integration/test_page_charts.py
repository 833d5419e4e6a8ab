"""History charts in a real Chromium."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import TypeAdapter

from gpumond.api.examples import VERDICT
from gpumond.model.frame import Verdict
from tests.integration.browser import PageSession, needs_chromium, open_page
from tests.running import RunningDaemon

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [needs_chromium, pytest.mark.timeout(180)]


def test_chart_shows_the_chosen_range_up_to_now(session: PageSession):
    page = session.page
    page.locator("h3 button").click()
    for name in ("15 min", "1 h", "24 h"):
        with page.expect_response(lambda answer: "signal=live" in answer.url):
            page.locator(".device").get_by_role("button", name=name).click()
        page.locator(".device svg").wait_for()
        page.locator(".unknown").get_by_text("daemon started").wait_for()
        edges, path = page.evaluate("""() => {
            const edge = node => { const box = node.getBoundingClientRect(); return [box.left, box.right]; };
            const [plot, unknown] = ['.plot', '.unknown'].map(query => edge(document.querySelector(query)));
            return [[plot, unknown], document.querySelector('.device path.used').getAttribute('d')];
        }""")
        (left, right), (begins, ends) = edges
        points = [tuple(map(float, point.split())) for point in re.split("[ML]", path) if point]
        assert begins == pytest.approx(left, abs=1)
        assert points[0][0] / 1000 == pytest.approx((ends - left) / (right - left), abs=0.01), name
        assert points[-1][0] == pytest.approx(1000, abs=0.1), "up to now"
        assert all(one[0] == other[0] or one[1] == other[1] for one, other in pairwise(points)), "steps"


INTERVALS = """async ([times, length, from, to, started]) => {
    const { intervals, unknown } = await import('/chart.js');
    const found = intervals(times.map(at => ({ at })), length, from, to, started);
    return [found.map(each => [each.at, each.end]), unknown(found, from, to).map(each => [each.from, each.to])];
}"""


@pytest.mark.parametrize(
    ("times", "length", "known", "unknown"),
    [
        ([-10, 20, 50, 80], 30, [[0, 20], [20, 50], [50, 80], [80, 100]], []),
        ([20, 50], 30, [[20, 50], [50, 80]], [[0, 20], [80, 100]]),
        ([0, 20, 60, 80], 20, [[0, 20], [20, 40], [60, 80], [80, 100]], [[40, 60]]),
        ([90, 92, 94, 98, 99], None, [[90, 92], [92, 94], [94, 98], [98, 99], [99, 100]], [[0, 90]]),
        (
            [10, 12, 14, 80, 82],
            None,
            [[10, 12], [12, 14], [14, 16], [80, 82], [82, 84]],
            [[0, 10], [16, 80], [84, 100]],
        ),
        ([], None, [], [[0, 100]]),
    ],
    ids=["blocks", "edges", "gap", "samples", "samples with a gap", "nothing"],
)
def test_unknown_values_are_marked_in_the_chart(
    session: PageSession, times: list[float], length: float | None, known: list[Any], unknown: list[Any]
):
    assert session.page.evaluate(INTERVALS, [times, length, 0, 100, -1000]) == [known, unknown]


def test_first_block_begins_no_earlier_than_the_daemon(session: PageSession):
    assert session.page.evaluate(INTERVALS, [[30, 60], 30, 0, 100, 42]) == [[[42, 60], [60, 90]], [[0, 42], [90, 100]]]


def test_evidence_of_a_leak_is_drawn(browser: Browser, demo: RunningDaemon):
    verdict = TypeAdapter(Verdict).dump_python(VERDICT, mode="json")
    fit = verdict["fit"]

    def with_leak(frame: Any) -> None:
        frame["verdicts"] = [verdict | {"device_uuid": frame["snapshot"]["devices"][0]["uuid"]}]

    with open_page(browser, demo, rewrite=with_leak) as session:
        page = session.page
        page.get_by_text("Evidence").click()
        page.locator(".fit svg").wait_for()
        paths = dict(
            page.evaluate("""() => [...document.querySelectorAll('.fit path')].map(
            path => [path.className.baseVal, path.getAttribute('d')])""")
        )
        (text,), refused = session.texts(".fit p", ".refused li")
    assert paths["points"].count("M") == len(fit["points"])
    (begin, _), (end, _) = re.findall(r"([\d.]+) ([\d.]+)", paths["line"])
    assert (float(begin), float(end)) == (0, 1000)
    assert text.startswith("32.0 MiB each minute (31.6 MiB to 32.4 MiB); the device is full at ")
    assert refused == [
        "Other explanation, warm-up: the slope of the last half as a share of that of the first half is 0.99."
    ]


@pytest.mark.parametrize(("seconds_left", "drawn"), [(240.0, True), (86_400.0, False)], ids=["soon", "in a day"])
def test_crossing_with_the_size_is_drawn_where_it_is_near(session: PageSession, seconds_left: float, drawn: bool):
    fit = {
        "points": [[1000.0 + 60 * number, float(number << 20)] for number in range(6)],
        "at": 1300.0,
        "level_bytes": float(5 << 20),
        "slope_bytes_per_second": (1 << 20) / 60,
        "band_bytes": 0.0,
        "full_at": 1300 + seconds_left,
        "full_at_latest": 1300 + 1.1 * seconds_left,
    }
    script = """async fit => {
        const { limits, line } = await import('/fit.js');
        return [limits(fit), line(fit, fit.full_at)];
    }"""
    found, level = session.page.evaluate(script, fit)
    assert found["from"] == 1000
    assert found["full"] == (level if drawn else None)
    assert found["to"] == (fit["full_at_latest"] if drawn else 1600)
    assert found["low"] == 0
    assert found["high"] >= max(bytes for _, bytes in fit["points"])
