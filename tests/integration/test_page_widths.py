"""The page at the widths of a desktop, a tablet and a phone: what fits, and what its dialogs show first."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from gpumond.facts.pools import API_FORCE_HINT
from gpumond.features.flush.routes import FLUSH_EXAMPLE, FLUSH_RESPONSE
from gpumond.serve.examples import RECEIPT
from tests.helpers.browser import PageSession, needs_chromium, open_page, show_frame, sign_in, signed_in
from tests.helpers.running import RunningDaemon

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Route

pytestmark = [needs_chromium, pytest.mark.timeout(180)]
DESKTOP = {"width": 1440, "height": 900}
TABLET = {"width": 1024, "height": 768}
NARROWEST_TABLE = {"width": 961, "height": 768}
PHONE = {"width": 390, "height": 844}
WIDTHS = pytest.mark.parametrize("viewport", [DESKTOP, TABLET, PHONE], ids=["desktop", "tablet", "phone"])
OUTCOMES = ("freed", "refused", *["nothing"] * 7)
REASON = f"train was flushed 1 s ago; try again in 4 s, or now {API_FORCE_HINT}"


def answered(*outcomes: str) -> Any:
    """Return the answer to a flush of one program for each outcome."""
    receipts = tuple(
        replace(RECEIPT, pid=100 + place, outcome=outcome, reason=REASON if outcome == "refused" else "")  # type: ignore[arg-type]
        for place, outcome in enumerate(outcomes)
    )
    return FLUSH_RESPONSE.dump_python(replace(FLUSH_EXAMPLE, receipts=receipts), mode="json")


def is_inside(node: Locator, other: Locator) -> bool:
    return node.evaluate(
        """(node, other) => {
            const [own, outer] = [node, other].map((each) => each.getBoundingClientRect());
            const across = outer.left <= own.left && own.right <= outer.right;
            return across && outer.top <= own.top && own.bottom <= outer.bottom;
        }""",
        other.element_handle(),
    )


@WIDTHS
def test_result_of_a_flush_opens_at_its_total(browser: Browser, demo: RunningDaemon, viewport: Any):
    def answer(route: Route) -> None:
        if not route.request.url.endswith("/flushes"):
            return route.continue_()
        planned = route.request.post_data_json["dry_run"]
        return route.fulfill(json=answered(*["planned"] * len(OUTCOMES)) if planned else answered(*OUTCOMES))

    with open_page(browser, demo, viewport, guard=answer) as session:
        page = session.page
        page.get_by_role("button", name="Flush all…").click()
        sign_in(session, demo)
        dialog = page.locator("dialog#flush")
        dialog.get_by_text("This flush should release").wait_for()
        assert is_inside(dialog.locator("#flush-words"), dialog)
        assert is_inside(dialog.get_by_role("button", name="Flush now"), dialog)
        dialog.get_by_role("button", name="Flush now").click()
        dialog.get_by_text(" released.").wait_for()
        assert is_inside(dialog.get_by_role("heading", name="Flush of"), dialog)
        assert is_inside(dialog.locator("#flush-words"), dialog)
        close = dialog.get_by_role("button", name="Close")
        assert close.evaluate("node => node === document.activeElement")
        assert is_inside(close, dialog)
        assert dialog.locator(".outcome:visible").all_inner_texts() == ["freed", "refused"]
        assert dialog.locator("summary").all_inner_texts() == ["Nothing to release: 7 of 9"]
        dialog.get_by_text("try again in 4 s, or now with gpumond flush --force").wait_for()


def test_wrong_token_is_refused_in_the_dialog(browser: Browser, demo: RunningDaemon):
    with open_page(browser, demo) as session:
        page = session.page
        page.get_by_role("button", name="Sign in").click()
        dialog = page.get_by_role("dialog", name="Sign in")
        dialog.get_by_label("Token").fill("gpm_wrong")
        dialog.get_by_label("Token").press("Enter")
        dialog.get_by_text("The token is invalid or has been revoked").wait_for()
        assert page.get_by_role("button", name="Sign out").count() == 0
        assert page.evaluate("sessionStorage.length") == 0
        sign_in(session, demo)
        dialog.wait_for(state="hidden")
        page.get_by_role("button", name="Sign out").wait_for()


def test_sign_in_without_the_daemon_says_so(browser: Browser, demo: RunningDaemon):
    with open_page(browser, demo) as session:
        page = session.page
        page.get_by_role("button", name="Sign in").click()
        page.route("**/api/v1/sessions/code", lambda route: route.abort())
        sign_in(session, demo)
        page.get_by_role("dialog", name="Sign in").get_by_text("The daemon doesn't respond.").wait_for()


@WIDTHS
def test_buttons_of_a_dialog_are_inside_it(browser: Browser, demo: RunningDaemon, viewport: Any):
    with signed_in(browser, demo, viewport=viewport) as session:
        session.page.locator("tbody .of-program", has_text="train-llm").get_by_role("button").first.click()
        session.page.locator(".why button").click()
        dialog = session.page.locator("dialog#why")
        dialog.get_by_role("button", name="Save a snapshot").click(trial=True)  # enabled after the answer
        buttons = dialog.locator(".buttons button")
        assert [is_inside(each, dialog) for each in buttons.all()] == [True] * 3


def heads(session: PageSession, table: str) -> list[str]:
    return session.page.locator(f"{table} thead th:visible").all_inner_texts()


def with_two_devices(frame: Any) -> None:
    (device,) = frame["snapshot"]["devices"]
    frame["snapshot"]["devices"].append(device | {"uuid": "GPU-other", "index": 1})


def test_tablet_shows_what_memory_consists_of(browser: Browser, demo: RunningDaemon):
    with open_page(browser, demo, TABLET, rewrite=with_two_devices) as session:
        session.shows_content()
        columns = ["GPU", "PID", "Program", "Used", "Waste", "Live", "Cached", "Stranded", "Overhead"]
        assert heads(session, "#processes") == columns
        assert heads(session, "#device-rows") == [
            "Device",
            "Memory",
            "Used",
            "Cached",
            "Stranded",
            "Busy",
            "°C",
            "W",
            "Problem",
        ]
        assert session.fits()


@pytest.mark.parametrize("viewport", [TABLET, NARROWEST_TABLE, PHONE], ids=["tablet", "narrow", "phone"])
def test_receipts_say_why_a_flush_was_refused(browser: Browser, demo: RunningDaemon, viewport: Any):
    receipts = answered(*OUTCOMES)["receipts"]
    with open_page(browser, demo, viewport) as session:
        page = session.page
        page.route("**/api/v1/receipts", lambda route: route.fulfill(json=receipts))
        page.get_by_role("button", name="Receipts", exact=True).click()
        row = page.get_by_role("table", name="Receipts").locator("tbody tr", has_text="refused")
        row.get_by_text("try again in 4 s, or now with gpumond flush --force").wait_for()
        for text in ("GPU", "Planned", "By"):
            assert row.locator(f"[data-title='{text}']").is_visible()
        assert session.fits()


@pytest.mark.parametrize("view", ["Alerts", "Rules", "Cases", "Quotas", "Baselines"])
def test_tables_fit(browser: Browser, demo: RunningDaemon, view: str):
    with open_page(browser, demo, NARROWEST_TABLE) as session:
        session.page.get_by_role("button", name=view, exact=True).click()
        session.page.locator("#view section:visible").first.wait_for()
        session.page.wait_for_timeout(500)
        assert session.fits()


LABELS = """row => [...row.children].slice(2).filter(cell => cell.checkVisibility()).map(cell =>
    [getComputedStyle(cell, '::before').content, cell.textContent])"""


def test_each_value_has_a_label_on_a_phone(browser: Browser, demo: RunningDaemon):
    receipt, *_ = answered("deferred")["receipts"]
    unknown = receipt | {"planned": None, "expected": None, "allocator": None, "reason": ""}
    with open_page(browser, demo, PHONE) as session:
        page = session.page
        page.route("**/api/v1/receipts", lambda route: route.fulfill(json=[unknown]))
        page.get_by_role("button", name="Receipts", exact=True).click()
        row = page.get_by_role("table", name="Receipts").locator("tbody tr")
        row.get_by_text("deferred").wait_for()
        cells = dict(row.evaluate(LABELS))
        titles = ("GPU", "Pool", "Outcome", "Planned", "Expected at start", "Released", "Driver", "By")
        assert [*cells] == [f'"{title} "' for title in titles]
        assert cells['"Planned "'] == cells['"Pool "'] == "-"


def test_receipts_are_in_the_order_in_which_they_finished(browser: Browser, demo: RunningDaemon):
    receipt, *_ = answered("freed")["receipts"]
    slow, quick = (
        receipt | {"pid": pid, "started_at": at, "duration_seconds": seconds}
        for pid, at, seconds in ((1, 1e9, 60.0), (2, 1e9 + 30, 1.0))
    )
    with open_page(browser, demo, DESKTOP) as session:
        page = session.page
        page.route("**/api/v1/receipts", lambda route: route.fulfill(json=[slow, quick]))
        page.get_by_role("button", name="Receipts", exact=True).click()
        rows = page.get_by_role("table", name="Receipts").locator("tbody td:nth-child(2)")
        rows.first.wait_for()
        assert [text.partition("pid ")[2] for text in rows.all_inner_texts()] == ["1)", "2)"]


RIGHT = """node => Math.max(...[...node.children]
    .filter(each => each.checkVisibility()).map(each => each.getBoundingClientRect().right))"""


@pytest.mark.parametrize("name", ["Simulated 24 GiB", "NVIDIA H100 80GB HBM3 with a long name"])
def test_figures_of_now_keep_clear_of_the_ranges_at_a_moment(browser: Browser, demo: RunningDaemon, name: str):
    frame = demo.get("frame")
    for device in frame["snapshot"]["devices"]:
        device |= {"name": name}
        device["sensors"] |= {"gpu_utilization_ratio": 1.0, "gpu_temperature_celsius": 100.0, "power_watts": 1200.0}
    with open_page(browser, demo, DESKTOP) as session:
        page = session.page
        show_frame(session, frame)
        page.locator("#hero svg").first.wait_for()
        for _ in range(2):
            end = page.locator("#hero > .head").evaluate(RIGHT)
            begin = page.locator("#hero .ranges").bounding_box()
            assert begin
            assert end + 4 <= begin["x"]
            page.locator("#hero .plot").hover(position={"x": 300, "y": 100})
            page.locator("#hero.past").wait_for()


LINES = """plot => {
    const width = plot.clientWidth
    const inner = [...plot.querySelector('.grid').getAttribute('d').matchAll(/M([\\d.]+) 0V100/g)]
        .map(found => width * found[1] / 1000).filter(x => Math.min(x, width - x) >= 34)
    return [inner.length, plot.querySelectorAll('.axis.time').length]
}"""


def test_each_line_of_the_time_axis_with_space_has_a_text(browser: Browser, demo: RunningDaemon):
    end = 1_700_000_400 + 859  # 41 s after the beginning is a whole minute
    with open_page(browser, demo, DESKTOP) as session:
        session.page.goto("about:blank")
        session.page.goto(f"{demo.url}/#range={end - 900}-{end}")
        session.page.locator("#hero .plot .axis.time").first.wait_for()
        lines, texts = session.page.locator("#hero .plot").evaluate(LINES)
        assert lines == texts
