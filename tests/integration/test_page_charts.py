"""History charts in a real Chromium."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest

from tests.integration.browser import PageSession, needs_chromium

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
