"""The page for all eyes, hands and screens."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.browser import PHONE, axe, looking, needs_chromium, sign_in
from tests.running import RunningDaemon

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [needs_chromium, pytest.mark.timeout(180)]


def test_page_fits_on_a_phone(browser: Browser, demo: RunningDaemon):
    with looking(browser, demo, PHONE) as sight:
        sight.page.locator("tbody .of-program button").first.click()
        sight.page.locator("tbody svg").wait_for()
        assert sight.fits()
        sight.page.get_by_role("button", name="Sign in").click()
        assert sight.fits()


AXE = axe()
CHECK = """async () => (await axe.run(document, { resultTypes: ['violations'] })).violations
    .map(found => [found.id, found.impact, found.nodes.map(node => node.target.join(' '))])"""


@pytest.mark.skipif(AXE is None, reason="needs axe-core in build/axe (npm pack axe-core; see .ci/run)")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [None, PHONE], ids=["wide", "phone"])
def test_axe_finds_nothing(browser: Browser, demo: RunningDaemon, scheme: str, viewport: Any):
    assert AXE
    with looking(browser, demo, viewport, color_scheme=scheme) as sight:
        page = sight.page
        page.locator("tbody .of-program button").first.click()
        page.locator("tbody svg").wait_for()
        page.evaluate(AXE.read_text())
        assert page.evaluate(CHECK) == []
        page.get_by_role("button", name="Flush all…").click()
        page.get_by_role("dialog", name="Sign in").wait_for()
        assert page.evaluate(CHECK) == []
        sign_in(sight, demo)
        page.get_by_role("dialog", name="Flush all").get_by_role("article").first.wait_for()
        assert page.evaluate(CHECK) == []


@pytest.mark.skipif(AXE is None, reason="needs axe-core in build/axe (npm pack axe-core; see .ci/run)")
def test_axe_is_awake(browser: Browser, demo: RunningDaemon):
    assert AXE
    with looking(browser, demo) as sight:
        sight.page.locator("tbody").first.wait_for()
        sight.page.evaluate(
            "document.querySelector('#filter').closest('label').replaceWith(document.querySelector('#filter'))"
        )
        sight.page.evaluate(AXE.read_text())
        assert "label" in json.dumps(sight.page.evaluate(CHECK))


@pytest.mark.skipif(AXE is None, reason="needs axe-core in build/axe (npm pack axe-core; see .ci/run)")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_api_s_reference_unfolds_and_asks_nobody_else(browser: Browser, demo: RunningDaemon, scheme: str):
    assert AXE
    with looking(browser, demo, PHONE, color_scheme=scheme) as sight:
        sight.page.get_by_role("link", name="API").click()
        sight.page.get_by_text("Flush programs and return receipts").click()
        sight.page.get_by_role("link", name="FlushOutcome").first.click()
        sight.page.locator("#type-FlushOutcome").get_by_text("released_bytes").wait_for()
        assert sight.fits()
        sight.page.evaluate(AXE.read_text())
        assert sight.page.evaluate(CHECK) == []
        assert {url[: len(demo.url)] for url in sight.asked} == {demo.url}
