"""Views of the page: alerts, receipts and baselines; all views on a phone."""

from __future__ import annotations

import csv
import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import TypeAdapter

from gpumond.facts.suspension import SuspensionReceipt
from gpumond.facts.units import clock_text, size_text
from gpumond.features.suspend.routes import EXAMPLE_RECEIPT
from tests.helpers.agents import GIB
from tests.helpers.browser import (
    PHONE,
    PROGRAMS,
    PageSession,
    check_access,
    needs_chromium,
    open_page,
    put_rule,
    signed_in,
)
from tests.helpers.running import RunningDaemon, until

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [needs_chromium, pytest.mark.timeout(180)]


def test_alerts_of_the_past_have_links_to_chart_and_runbook(browser: Browser, demo: RunningDaemon):
    put_rule(demo, name="past")
    until(lambda: any(alert["rule"] == "past" for alert in demo.get("alerts")))
    put_rule(demo, name="past", above=5)
    until(lambda: any(alert["rule"] == "past" for alert in demo.get("alerts/history")))
    with open_page(browser, demo) as session:
        page = session.page
        page.get_by_role("button", name="Alerts", exact=True).click()
        page.get_by_role("table", name="Alert history").wait_for()
        page.keyboard.press("/")
        page.keyboard.type("past resolved")
        assert page.get_by_role("searchbox", name="Filter").input_value() == "past resolved"
        row = page.get_by_role("row", name="past GPU 0 resolved critical")
        row.wait_for()
        check_access(session)
        with page.expect_download() as saved:
            page.get_by_role("button", name="JSON").click()
        (record,) = json.loads(saved.value.path().read_text())
        assert (record["rule"], record["phase"]) == ("past", "resolved")
        row.get_by_role("link", name="Chart of past").click()
        page.locator(".device .plot[data-range*='-'] svg, .device .plot[data-range] svg").first.wait_for()
        assert "gpu=0" in session.address()
        page.goto(f"{demo.url}/docs/runbooks/leak")
        session.shows("Runbook: leak")


def test_view_says_that_it_loads(browser: Browser, demo: RunningDaemon):
    waiting: list[Any] = []

    def guard(route: Any) -> None:
        if route.request.url.endswith("api/v1/receipts") and not waiting:
            waiting.append(route)
        else:
            route.continue_()

    with open_page(browser, demo, guard=guard) as session:
        page = session.page
        page.get_by_role("button", name="Receipts", exact=True).click()
        loading = page.get_by_text("Loading…", exact=True)
        loading.wait_for()
        while not waiting:
            page.wait_for_timeout(50)
        waiting[0].continue_()
        loading.wait_for(state="hidden")
        page.get_by_role("heading", name="Receipts").wait_for()


def test_receipts_are_listed_filtered_and_downloaded(browser: Browser, demo: RunningDaemon):
    status, _, _ = demo.flush(target={"workload": "train-llm"}, force=True)
    assert status == 200
    *_, receipt = (each for each in demo.get("receipts") if each["workload"] == "train-llm")
    with open_page(browser, demo) as session:
        page = session.page
        page.get_by_role("button", name="Receipts").click()
        page.get_by_role("searchbox", name="Filter").fill(f"train-llm {receipt['outcome']}")
        row = page.get_by_role("table", name="Receipts").locator("tbody tr").first
        row.get_by_text(f"train-llm (pid {receipt['pid']})").wait_for()
        cells = row.locator("th, td").all_inner_texts()
        assert cells[1] == f"train-llm (pid {receipt['pid']})"
        assert cells[4] == receipt["outcome"]
        assert cells[7:9] == [size_text(receipt["released_bytes"]), size_text(receipt["driver_released_bytes"])]
        check_access(session)
        with page.expect_download() as saved:
            page.get_by_role("button", name="CSV").click()
        records = list(csv.DictReader(saved.value.path().read_text().splitlines()))
        assert records[0]["released_bytes"] == str(receipt["released_bytes"])
        other = PageSession(page.context, session.address())
        other.page.get_by_role("table", name="Receipts").wait_for()
        assert other.page.get_by_role("searchbox", name="Filter").input_value() == f"train-llm {receipt['outcome']}"


def test_receipts_of_suspensions_are_listed_with_those_of_flushes(browser: Browser, demo: RunningDaemon):
    receipts = TypeAdapter(list[SuspensionReceipt]).dump_python([EXAMPLE_RECEIPT], mode="json")
    with open_page(browser, demo) as session:
        page = session.page
        page.route("**/suspensions/receipts", lambda route: route.fulfill(status=200, json=receipts))
        page.get_by_role("button", name="Receipts").click()
        page.get_by_role("searchbox", name="Filter").fill("notebook suspended")
        row = page.get_by_role("table", name="Receipts").locator("tbody tr").first
        row.get_by_text("notebook (pid 4242)").wait_for()
        cells = row.locator("th, td").all_inner_texts()
        assert cells[2:4] == [EXAMPLE_RECEIPT.device_uuids[0], "-"]
        assert cells[4:11] == ["suspended", "-", "61.0 GiB", "-", "61.0 GiB", "uid:1000", "60.0 GiB on the host"]


def test_baselines_are_recorded_compared_and_deleted(browser: Browser, demo: RunningDaemon):
    with signed_in(browser, demo, "baselines") as session:
        page = session.page
        page.on("dialog", lambda dialog: dialog.accept())
        for name in ("first", "second"):
            page.get_by_role("textbox", name="Name", exact=True).fill(name)
            page.get_by_role("textbox", name="Duration").fill("2s")
            page.get_by_role("button", name="Record").click()
            page.get_by_role("row", name=name).get_by_text("complete").wait_for(timeout=60_000)
        page.get_by_role("button", name="Compare first").click()
        session.shows("Nothing to compare with yet: start a measurement.")
        page.get_by_role("combobox", name="with", exact=True).select_option("second")
        table = page.get_by_role("table", name="Differences")
        table.wait_for()
        measures = {tuple(row[:2]) for row in rows_of(session)}
        assert {(program, "used typical") for program in PROGRAMS} <= measures
        assert page.get_by_role("img", name="Used memory of train-llm, before and after").count() == 1
        check_access(session)
        page.get_by_role("combobox", name="with", exact=True).select_option("a new measurement")
        page.get_by_role("button", name="Measure now").click()
        page.get_by_text(re.compile(r"Measured since .+ for [23] s\.")).wait_for(timeout=60_000)
        found = demo.get("baselines/first/compare")["differences"]
        shown = {tuple(row[:2]): row[2:4] for row in rows_of(session)}
        for each in found:
            if each["measure"] == "used":
                key = (each["workload"], f"used {each['stat']}")
                assert shown[key] == [size_text(each["before"]), size_text(each["after"])]
        page.get_by_role("button", name="Delete second").click()
        page.get_by_role("row", name="second").wait_for(state="detached")
        assert [each["name"] for each in demo.get("baselines")] == ["first"]


def rows_of(session: PageSession) -> list[list[str]]:
    script = """() => [...document.querySelectorAll('table[aria-label=Differences] tbody tr')].map(
        row => [...row.children].map(cell => cell.textContent))"""
    found: list[list[str]] = session.page.evaluate(script)
    return found


@pytest.mark.parametrize("view", ["alerts", "rules", "receipts", "baselines"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_view_is_accessible_and_fits_on_a_phone(browser: Browser, demo: RunningDaemon, view: str, scheme: str):
    with open_page(browser, demo, PHONE, color_scheme=scheme) as session:
        session.page.get_by_role("button", name=view.capitalize(), exact=True).click()
        session.page.locator(f"#views [aria-current=page]:text-is('{view.capitalize()}')").wait_for()
        session.page.locator("#view section:visible").wait_for()
        assert session.address().endswith(f"#view={view}")
        if view == "rules":
            row = session.page.get_by_role("row", name="device-nearly-full")
            boxes = [row.get_by_role(role).first.bounding_box() or {} for role in ("rowheader", "cell")]
            assert boxes[0]["height"] < 30 <= 300 <= boxes[1]["width"]
            session.page.get_by_role("button", name="New rule").click()
            session.page.get_by_role("form", name="New rule").wait_for()
        assert session.fits()
        check_access(session)


def test_view_that_cannot_be_loaded_says_so(browser: Browser, demo: RunningDaemon):
    with open_page(browser, demo) as session:
        session.shows_content()
        session.page.route("**/lazyviews-*.js", lambda route: route.fulfill(status=404))
        session.page.get_by_role("button", name="Alerts", exact=True).click()
        session.shows("the daemon may have been updated")
        session.page.unroute("**/lazyviews-*.js")
        session.page.reload()
        session.page.get_by_role("table", name="Alert history").wait_for()


def test_alert_in_the_history_began_when_it_fired(session: PageSession, demo: RunningDaemon):
    at = int(demo.get("frame")["snapshot"]["taken_at"]) - 3600
    summary = f"etl (pid 7) is idle; again since {clock_text(at + 129)}"
    alert = {"rule": "mine", "phase": "resolved", "labels": [], "annotations": [["summary", summary]], "value": 1.0}
    alert |= {
        "silenced_by": [],
        "active_at": at - 30,
        "fired_at": at,
        "resolved_at": at + 229,
        "pid": None,
        "start_ticks": None,
    }
    over = [["summary", f"ended at {clock_text(at + 50)}; the alert was: etl (pid 7) is idle"]]
    ended = alert | {"rule": "over", "annotations": over}
    alerts = [alert, ended, ended | {"rule": "kept", "phase": "firing", "resolved_at": None}]
    session.page.route("**/api/v1/alerts/history", lambda route: route.fulfill(json=alerts))
    session.page.get_by_role("button", name="Alerts", exact=True).click()
    rows = session.page.get_by_role("table", name="Alert history").locator("tr")
    for rule in ("over", "kept"):
        rows.filter(has_text=rule).get_by_text("50 s", exact=True).wait_for()
    row = rows.filter(has_text="mine")
    row.get_by_text("3 min 49 s", exact=True).wait_for()
    shown = session.page.evaluate("at => new Date(1000 * at).toLocaleTimeString('en-GB')", at)
    row.get_by_text(shown).wait_for()


@pytest.mark.parametrize("count", [1, 2])
def test_command_for_the_queue_names_a_device_where_there_are_several(
    browser: Browser, demo: RunningDaemon, count: int
):
    def idle(frame: Any) -> None:
        (device,) = frame["snapshot"]["devices"]
        frame["snapshot"]["devices"] = [device, device | {"uuid": "GPU-x1", "index": 1}][:count]
        frame["queue"], frame["grants"] = [], []

    with open_page(browser, demo, rewrite=idle) as session:
        session.page.get_by_role("button", name="Queue", exact=True).click()
        session.shows(f"gpumond run --need SIZE {'--need-device GPU ' * (count > 1)}--wait 10m -- COMMAND")


def with_requests(frame: Any) -> None:
    """Add a request for memory that waits, and a grant whose program uses a part of its memory."""
    device = frame["snapshot"]["devices"][0]
    device["free_bytes"] = 9 * GIB
    own = {"device_uuid": device["uuid"], "user": "dev", "need_bytes": 20 * GIB}
    since = frame["snapshot"]["taken_at"] - 60
    later = {"available_bytes": GIB, "missing_bytes": 7 * GIB, "ahead": 0, "since": since}
    later["holders"] = [{"pid": 7, "workload": "notebook", "used_bytes": 9 * GIB, "granted_bytes": 0}]
    frame["queue"] = [own | later | {"id": "a", "workload": "later", "pid": 42}]
    frame["grants"] = [own | {"id": "b", "workload": "pretrain", "pid": 43, "unused_bytes": 15 * GIB}]


def test_requests_that_wait_and_grants_that_are_not_used_are_listed(browser: Browser, demo: RunningDaemon):
    with open_page(browser, demo, rewrite=with_requests) as session:
        session.page.locator("#hero-queue li").first.wait_for()
        assert session.page.locator("#hero-queue li").all_text_contents() == [
            "later (pid 42, dev) has been waiting 1 min for 20.0 GiB on GPU 0; 1.0 GiB is available, "
            "flushes would release 12.0 GiB, and 7.0 GiB would still be missing; notebook uses 9.0 GiB",
            "pretrain (pid 43, dev) is granted 20.0 GiB of GPU 0; 15.0 GiB of it isn't used yet; only 9.0 GiB is free",
        ]
        signs = session.page.locator("#hero-queue i")
        assert signs.evaluate_all("all => all.map(sign => sign.className)") == ["waiting", "granted"]
        edge = session.page.locator("#hero .edge")
        label = edge.get_attribute("aria-label") or ""
        assert label.endswith(", granted 9.0 GiB"), "no more than what is free"
        hatched, ground = edge.locator(".granted"), edge.bounding_box() or {}
        size = session.page.evaluate("document.querySelector('#hero .total').textContent").split(" of ")[1]
        part = (hatched.bounding_box() or {})["height"] / ground["height"]
        assert part == pytest.approx(9 / float(size.split()[0]), abs=0.02)
        assert "gradient(45deg" in hatched.evaluate("node => getComputedStyle(node).backgroundImage")
        before = "() => getComputedStyle(document.querySelector('#hero-queue li'), '::before').content"
        assert session.page.evaluate(before) == "none"
        session.page.locator("#hero .plot").hover()
        session.page.wait_for_function(f"{before[6:]} === '\"now: \"'")
        session.page.mouse.move(0, 0)
        session.page.keyboard.press("Control+k")
        session.page.keyboard.type("waiting for")
        session.page.keyboard.press("Enter")
        rows = session.page.get_by_role("table", name="Queue").locator("tbody tr")
        rows.first.wait_for()
        waits, granted = (row.locator("bdi").all_text_contents() for row in rows.all())
        assert waits[:7] == ["later, pid 42", "waiting", "0", "20.0 GiB", "1.0 GiB", "12.0 GiB", "7.0 GiB"]
        assert waits[8:] == ["-", "notebook uses 9.0 GiB"]
        assert granted[:4] == ["pretrain, pid 43", "granted, 15.0 GiB not used yet", "0", "20.0 GiB"]
        assert session.fits()
