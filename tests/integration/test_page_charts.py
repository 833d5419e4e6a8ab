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
