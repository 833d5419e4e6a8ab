"""The view of out-of-memory cases, from the card of its alert and back."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import TypeAdapter

from gpumond.features.oom.case import CaseSummary, Curve, RankedCase, Timeline, summary_of
from gpumond.features.oom.routes import EXAMPLE
from tests.helpers.agents import GIB
from tests.helpers.browser import PHONE, PageSession, check_access, needs_chromium, open_page
from tests.helpers.running import RunningDaemon, until

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [needs_chromium, pytest.mark.timeout(180)]


def serve_case(session: PageSession, daemon: RunningDaemon, **changed: Any) -> None:
    """Answer requests for cases with one on the daemon's device."""
    uuid = until(lambda: daemon.get("devices"))[0]["uuid"]
    curves = tuple(
        Curve(pid=pid, workload=name, used_bytes=(GIB, None, 24 * GIB))
        for pid, name in ((4242, "train"), (17, "notebook"))
    )
    case = replace(
        EXAMPLE, device_uuid=uuid, lines_at=EXAMPLE.at - 0.5, timeline=Timeline((1.0, 2.0, 3.0), curves), **changed
    )
    listed = TypeAdapter(list[CaseSummary]).dump_json([summary_of(case)]).decode()
    whole = TypeAdapter(RankedCase).dump_json(RankedCase(case=case)).decode()
    page = session.page
    page.route("**/api/v1/oom", lambda route: route.fulfill(content_type="application/json", body=listed))
    page.route(f"**/api/v1/oom/{case.id}", lambda route: route.fulfill(content_type="application/json", body=whole))


def with_alert(frame: Any) -> None:
    """Replace the problems by an alert that names the case."""
    labels = [["severity", "critical"], ["uuid", frame["snapshot"]["devices"][0]["uuid"]]]
    annotations = [["summary", "train ran out of memory"], ["case", EXAMPLE.id]]
    alert = {
        "rule": "out-of-memory",
        "phase": "firing",
        "labels": labels,
        "annotations": annotations,
        "silenced_by": [],
    }
    frame["alerts"] = [alert | {"pid": None, "start_ticks": None, "value": 1.0, "active_at": 1.0, "fired_at": 1.0}]
    frame["verdicts"] = []


@pytest.mark.parametrize("viewport", [None, PHONE], ids=["wide", "phone"])
def test_case_is_a_view_of_the_page(browser: Browser, demo: RunningDaemon, viewport: Any):
    with open_page(browser, demo, viewport, rewrite=with_alert) as session:
        serve_case(session, demo, reserved_bytes=GIB // 2, overcount_bytes=2 * GIB)
        page = session.page
        page.locator(".card").get_by_role("link", name="Case").click()
        page.get_by_role("heading", name="train (pid 4242) ran out of memory on GPU 0").wait_for()
        assert page.locator("#views [aria-current=page]").inner_text() == "Cases"
        session.shows("9.0 GiB was missing")
        remedy = page.get_by_role("table", name="Remedies").locator("tbody tr")
        remedy.get_by_text("flush notebook (pid 17)").wait_for()
        assert "30.0 GiB" in remedy.inner_text()
        assert page.locator(".case .plot path:not([class])").count() == 2
        assert page.locator(".case .plot path.size, .case .plot path.bound").count() == 2
        drawn = page.locator(".case .plot svg").get_attribute("aria-label") or ""
        assert drawn.endswith("at most 48.0 GiB")
        keys = page.locator(".case .keys").inner_text()
        assert "usable 23.5 GiB" in keys
        assert "with the request 32.5 GiB" in keys
        assert "1.0 GiB free at the error" in keys
        ledger = page.get_by_role("table", name="GPU memory 0.5 s before the error (")
        last = [row.split() for row in ledger.locator("tbody tr").all_inner_texts()[-3:]]
        assert last == [
            ["-", "reserved", "512.0", "MiB"],
            ["-", "free", "1.0", "GiB"],
            ["-", "overcount", "-2.0", "GiB"],
        ]
        assert "train.py:31 step" in page.get_by_role("table", name="Call stack at the error").inner_text()
        assert page.get_by_role("link", name="Save as HTML").get_attribute("download")
        assert session.fits()
        check_access(session)
        remedy.get_by_role("button", name="Flush…").click()
        page.get_by_role("form", name="Sign in").get_by_role("button", name="Cancel").click()
        page.go_back()
        page.locator("#hero .plot svg").wait_for()


def test_a_case_at_a_limit_shows_the_program_against_it(browser: Browser, demo: RunningDaemon):
    with open_page(browser, demo, rewrite=with_alert) as session:
        exact = replace(EXAMPLE.remedies[0], name="limit", text="raise the limit", size_bytes=9 * GIB)
        serve_case(session, demo, limit_bytes=40 * GIB, errors=3, remedies=(exact,))
        page = session.page
        page.locator(".card").get_by_role("link", name="Case").click()
        page.get_by_role("heading", name="train (pid 4242) reached its limit of 40.0 GiB on GPU 0").wait_for()
        session.shows("Last of 3 errors at this limit · up to 9.0 GiB was missing")
        assert "9.0 GiB" in page.get_by_role("table", name="Remedies").locator("tbody tr").inner_text()
        session.shows("The program before the error")
        keys = page.locator(".case .keys").inner_text()
        assert "limit 40.0 GiB" in keys
        assert "free at the error" not in keys
        assert "usable" not in keys


def test_cases_are_listed_and_an_unknown_one_is_named(browser: Browser, demo: RunningDaemon):
    with open_page(browser, demo) as session:
        serve_case(session, demo)
        page = session.page
        page.get_by_role("button", name="Cases", exact=True).click()
        page.get_by_role("table", name="Cases").wait_for()
        page.keyboard.press("/")
        page.keyboard.type("train")
        assert page.get_by_role("searchbox", name="Filter").input_value() == "train"
        page.get_by_role("row", name=re.compile("train .pid 4242.* 1 9.0 GiB")).wait_for()
        page.keyboard.press("Enter")
        heading = page.get_by_role("heading", name=re.compile("ran out of memory"))
        heading.wait_for()
        page.keyboard.press("Escape")
        heading.wait_for(state="hidden")
        assert "case=" not in session.address()
        for id in ("1-2-3", "bogus"):
            page.goto("about:blank")
            page.goto(f"{demo.url}/#view=cases&case={id}")
            session.shows("exist or has been removed; choose one from the list.")
        page.get_by_role("button", name="Overview").click()
        assert "case=" not in session.address()


def test_a_case_without_a_known_remedy_says_so(browser: Browser, demo: RunningDaemon):
    nothing = replace(EXAMPLE.remedies[0], name="nothing", text="no remedy is known: 1.6 GiB is missing", enough=False)
    with open_page(browser, demo) as session:
        serve_case(session, demo, remedies=(nothing,))
        session.page.get_by_role("button", name="Cases", exact=True).click()
        session.page.locator("td").get_by_role("link", name="Case").click()
        session.shows("No remedy is known: 1.6 GiB is missing.")
        assert session.page.get_by_role("table", name="Remedies").count() == 0
