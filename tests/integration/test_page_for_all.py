"""Accessibility of the page, small screens, and the reference of the API."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers.browser import CHECK, PHONE, axe, needs_chromium, open_page, sign_in
from tests.helpers.running import RunningDaemon

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [needs_chromium, pytest.mark.timeout(180)]


def test_page_fits_on_a_phone(browser: Browser, demo: RunningDaemon):
    with open_page(browser, demo, PHONE) as session:
        session.page.locator("tbody .of-program button").first.click()
        session.page.locator("tbody svg").wait_for()
        assert session.fits()
        session.page.get_by_role("button", name="Sign in").click()
        assert session.fits()


ALIGNMENTS = """() => [...document.querySelectorAll('#processes .number')].map(cell => getComputedStyle(cell))
    .map(style => [style.textAlign, style.fontVariantNumeric])"""


def test_remark_of_a_program_adds_one_line_on_a_phone(browser: Browser, demo: RunningDaemon):
    def stopped(frame: Any) -> None:
        for process in frame["processes"]:
            process["state"] = "stopped" if process["workload"] == "notebook" else "alive"

    with open_page(browser, demo, PHONE, rewrite=stopped) as session:
        session.shows("stopped")
        rows = session.page.locator("tbody.process", has=session.page.locator("text=/^(notebook|etl)$/"))
        one, other = sorted(rows.evaluate_all("all => all.map(row => row.offsetHeight)"))
        assert other - one <= 24


def test_numbers_of_processes_are_aligned(browser: Browser, demo: RunningDaemon):
    with open_page(browser, demo) as session:
        session.shows_content()
        alignments = session.page.evaluate(ALIGNMENTS)
        assert len(alignments) > 18
        assert {tuple(each) for each in alignments} == {("right", "tabular-nums")}


AXE = axe()


@pytest.mark.skipif(AXE is None, reason="needs axe-core in build/axe (npm pack axe-core; see .ci/run)")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [None, PHONE], ids=["wide", "phone"])
def test_axe_finds_nothing(browser: Browser, demo: RunningDaemon, scheme: str, viewport: Any):
    assert AXE
    with open_page(browser, demo, viewport, color_scheme=scheme) as session:
        page = session.page
        page.locator("tbody .of-program button").first.click()
        page.locator("tbody svg").wait_for()
        page.evaluate(AXE.read_text())
        assert page.evaluate(CHECK) == []
        page.get_by_role("button", name="Help").click()
        page.get_by_role("dialog", name="Help").wait_for()
        assert page.evaluate(CHECK) == []
        page.get_by_role("button", name="Close").click()
        page.get_by_role("button", name="Flush all…").click()
        page.get_by_role("form", name="Sign in").wait_for()
        assert page.evaluate(CHECK) == []
        sign_in(session, demo)
        page.get_by_role("dialog", name="Flush all").locator("#receipts > *").first.wait_for()
        assert page.evaluate(CHECK) == []


@pytest.mark.skipif(AXE is None, reason="needs axe-core in build/axe (npm pack axe-core; see .ci/run)")
def test_axe_finds_a_known_violation(browser: Browser, demo: RunningDaemon):
    assert AXE
    with open_page(browser, demo) as session:
        session.shows_content()
        session.page.evaluate(
            "document.querySelector('#filter').closest('label').replaceWith(document.querySelector('#filter'))"
        )
        session.page.evaluate(AXE.read_text())
        assert "label" in json.dumps(session.page.evaluate(CHECK))


@pytest.mark.skipif(AXE is None, reason="needs axe-core in build/axe (npm pack axe-core; see .ci/run)")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_api_reference_unfolds_and_requests_no_other_address(browser: Browser, demo: RunningDaemon, scheme: str):
    assert AXE
    with open_page(browser, demo, PHONE, color_scheme=scheme) as session:
        session.page.get_by_role("link", name="API").click()
        session.page.get_by_text("Flush programs and return receipts").click()
        session.page.get_by_role("link", name="FlushResponse").first.click()
        session.page.locator("#type-FlushResponse").get_by_text("released_bytes").wait_for()
        assert session.fits()
        session.page.evaluate(AXE.read_text())
        assert session.page.evaluate(CHECK) == []
        assert {url[: len(demo.url)] for url in session.requested_urls} == {demo.url}
