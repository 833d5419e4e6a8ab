"""Commands, themes, and lines of devices on the page."""

from __future__ import annotations

import re

import pytest

from tests.helpers.browser import PageSession, check_access, needs_chromium, show_frame
from tests.helpers.frames import make_frame
from tests.helpers.running import RunningDaemon, until
from tests.helpers.values import make_device

pytestmark = [needs_chromium, pytest.mark.timeout(180)]


def test_palette_jumps_and_acts_by_keyboard(session: PageSession, demo: RunningDaemon):
    page = session.page
    page.keyboard.press("Control+k")
    palette = page.get_by_role("dialog", name="Commands")
    text = palette.get_by_role("combobox", name="Command")
    page.keyboard.type("show notebook")
    option = palette.get_by_role("option", name=re.compile(r"Show notebook \(pid \d+\) on GPU 0"))
    option.wait_for()
    assert text.get_attribute("aria-activedescendant") == option.get_attribute("id")
    check_access(session)
    page.keyboard.press("Enter")
    page.locator("tbody.process .plot svg").wait_for()
    focused = "document.activeElement.closest('tbody').querySelector('.of-program bdi').textContent"
    assert page.evaluate(focused) == "notebook"
    page.keyboard.press(":")
    page.keyboard.type("theme dark")
    page.keyboard.press("Enter")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(17, 20, 24)"
    page.reload()
    session.shows_content()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(17, 20, 24)"
    page.get_by_role("button", name="Light", exact=True).click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    page.get_by_role("button", name="Dark", exact=True).click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(17, 20, 24)"
    assert "sim 0" not in page.locator("header").inner_text()
    page.keyboard.press(":")
    page.keyboard.type("view")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Rules").wait_for()
    page.keyboard.press(":")
    page.keyboard.type("pause")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Resume").wait_for()
    page.keyboard.press(":")
    page.keyboard.type("flush all")
    page.keyboard.press("Enter")
    page.get_by_role("form", name="Sign in").wait_for()


def test_theme_stays_in_the_tab_and_is_in_no_link(session: PageSession):
    page = session.page
    page.get_by_role("button", name="Dark", exact=True).click()
    page.get_by_role("button", name="Cases", exact=True).click()
    assert session.address().partition("#")[2] == "view=cases"
    page.reload()
    page.get_by_role("button", name="Light", exact=True).wait_for()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(17, 20, 24)"


def test_palette_lists_a_program_before_its_events(session: PageSession):
    page = session.page
    page.locator("#events li", has_text="train-llm").first.wait_for()
    page.keyboard.press("Control+k")
    page.keyboard.type("train-llm")
    options = page.locator("#palette-list li")
    assert options.first.inner_text().startswith("Show train-llm (pid ")
    found = [text.split()[0] for text in options.all_inner_texts()]
    assert "Minute" not in found[: found.index("Why")]
    page.keyboard.type(" why")
    page.keyboard.press("Enter")
    page.get_by_role("form", name="Sign in").get_by_role("button", name="Cancel").wait_for()


@pytest.mark.parametrize("verb", ["filter", "Filter processes by"])
def test_palette_filters_by_what_follows_the_verb(session: PageSession, verb: str):
    page = session.page
    page.keyboard.press("Control+k")
    page.keyboard.type(f"{verb} train")
    options = page.locator("#palette-list li")
    options.filter(has_text="Show train-llm").wait_for()
    assert options.first.inner_text() == "Filter processes by train"
    page.keyboard.press("Enter")
    assert page.get_by_label("Filter", exact=True).input_value() == "train"


def test_palette_opens_the_comparison_of_marked_rows(session: PageSession):
    page = session.page
    for name in ("Compare train-llm", "Compare etl"):
        page.get_by_role("button", name=name).click()
    page.keyboard.press("Control+k")
    page.keyboard.type("compare")
    page.locator("#palette-list li", has_text="View Compare").wait_for()
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Compare", exact=True).wait_for()
    assert page.locator(".chosen bdi").all_inner_texts() == ["train-llm", "etl"]
    page.keyboard.press("Control+k")
    page.keyboard.type("view alerts")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.textContent") == "Alerts", "Enter would open Compare again"


def test_palette_shows_an_event_of_another_device_on_its_chart(session: PageSession, demo: RunningDaemon):
    at = own_time(demo)
    devices = [make_device(f"GPU-x{index}", index=index) for index in range(2)]
    of = {"at": at - 5, "device_uuid": None, "pid": None, "start_ticks": None, "workload": "", "details": []}
    own = of | {"pid": 4242, "start_ticks": 7}
    events = [
        of | {"id": 1, "kind": "alert-fired", "summary": "the disk is full"},
        own | {"id": 2, "kind": "agent-connected", "summary": "old (pid 4242) connected"},
        own | {"id": 3, "kind": "process-ended", "summary": "old (pid 4242) has exited", "device_uuid": "GPU-x1"},
    ]
    show_frame(session, make_frame(*devices, taken_at=at, seq=7), events)
    page = session.page
    for text, shown in (("4242 connected", "1"), ("4242 exited", "1"), ("disk is full", "")):
        page.locator("#hero-of").select_option("0")
        page.keyboard.press("Control+k")
        page.keyboard.type(text)
        page.locator("#palette-list li", has_text="Minute before").wait_for()
        page.keyboard.press("Enter")
        assert page.locator("#hero-of").input_value() == shown


def test_palette_marks_programs_and_compares_the_marked_ones(session: PageSession):
    page = session.page
    for name in ("train-llm", "etl"):
        page.keyboard.press("Control+k")
        page.keyboard.type("mark ")
        page.locator("#palette-list li", has_text=re.compile(rf"^Mark {name} \(pid .* to compare it$")).click()
    page.keyboard.press("Control+k")
    page.keyboard.type("compare")
    page.locator("#palette-list li", has_text="Compare the 2 marked programs").click()
    page.get_by_role("heading", name="Compare", exact=True).wait_for()
    assert page.locator(".chosen bdi").all_inner_texts() == ["train-llm", "etl"]


def test_link_that_names_what_does_not_exist_says_so(session: PageSession, demo: RunningDaemon):
    session.page.goto("about:blank")
    session.page.goto(f"{demo.url}/#gpu=9&view=foo")
    session.shows("This link's view, foo, doesn't exist")
    session.shows("This link's GPU, 9, doesn't exist")


def test_palette_lists_problems_before_orders_and_opens_a_runbook(session: PageSession):
    page = session.page
    page.keyboard.press("Control+k")
    texts = page.locator("#palette-list li").all_inner_texts()
    shown, sorts = ([place for place, text in enumerate(texts) if text.startswith(word)] for word in ("Show", "Sort"))
    assert max(shown) < min(sorts, default=len(texts))
    for word, first in (
        ("oom", "Out of memory (OOM): cases"),
        ("export", "Download (export) "),
        ("zoom", "Range 5 min"),
        ("waste", "Sort by waste"),
    ):
        page.keyboard.type(word)
        page.locator("#palette-list li:first-child", has_text=first).wait_for()
        page.locator("#palette-text").fill("")
    page.keyboard.type("runbook fragmentation")
    page.keyboard.press("Enter")
    page.wait_for_url("**/docs/runbooks/fragmentation")


def test_row_of_a_device_has_its_line(session: PageSession, demo: RunningDaemon):
    (own,) = demo.get("devices")
    until(lambda: len({point["at"] // 5 for point in demo.get("history?uuid=0")["points"]}) > 4)
    devices = [make_device(own["uuid"] if not index else f"GPU-x{index}", index=index) for index in range(5)]
    show_frame(session, make_frame(*devices, taken_at=own_time(demo), seq=7))
    first = session.page.locator("#device-rows tbody").first.locator(".spark path")
    session.page.wait_for_function(
        "() => (document.querySelector('.spark path').getAttribute('d') ?? '').split('H').length > 3"
    )
    assert re.fullmatch(r"M[\d.]+ [\d.]+(?:V[\d.]+)+(?:H[\d.]+(?:V[\d.]+)+)+", first.get_attribute("d") or "")


def own_time(daemon: RunningDaemon) -> float:
    return float(daemon.get("snapshot")["taken_at"])
