"""The page on machines with many devices and processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from gpumond.facts.units import size_text
from tests.helpers.browser import CHECK, PHONE, PageSession, axe, needs_chromium, open_page
from tests.helpers.running import RunningDaemon
from tests.integration.large_machine import NODES, machine, show

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [needs_chromium, pytest.mark.timeout(300)]
AXE = axe()
MAX_NODES = 3000
MAX_ROWS = 61


def test_eight_devices_are_rows(session: PageSession):
    frame, page = machine(8, 64), session.page
    show(session, frame)
    assert page.evaluate("document.querySelector('#device-rows').offsetHeight") <= 210
    assert page.evaluate(NODES) <= MAX_NODES
    (totals,) = session.texts("#device-rows td:nth-child(3)")
    devices = frame["snapshot"]["devices"]
    assert totals == [f"{size_text(device['used_bytes'])} of {size_text(device['size_bytes'])}" for device in devices]
    page.get_by_role("button", name="GPU 3 ").click()
    assert session.texts("#hero-title span", ".device .total")[0] == ["GPU 3"]
    session.shows("64 of 512")
    assert set(session.texts("tbody.process .of-gpu")[0]) == {"3"}
    assert session.address().endswith("#gpu=3")
    page.keyboard.press("Escape")
    assert session.texts("#hero-title span")[0] == ["8 GPUs"]
    page.get_by_label("Group by").select_option("device")
    groups, sums = session.texts("tbody.group .of-program bdi", "tbody.group .of-used")
    assert groups == [f"GPU {index}" for index in range(7, -1, -1)], "the largest first"
    assert sums == [size_text(device["used_bytes"]) for device in reversed(devices)]


def test_first_screen_has_eight_devices_and_eight_processes(session: PageSession):
    session.page.set_viewport_size({"width": 1440, "height": 900})
    show(session, machine(8, 2))
    bottoms = "all => all.map(one => Math.ceil(one.getBoundingClientRect().bottom))"
    chart, devices, processes = (
        session.page.locator(rows).evaluate_all(bottoms)
        for rows in ("#hero .plot", "#device-rows tbody", "tbody.process")
    )
    assert max(chart) < min(devices)
    assert max(devices) < min(processes)
    assert len(devices) == 8
    assert processes[7] <= 900


@pytest.mark.parametrize("count", [12, 16])
def test_each_device_and_its_problem_can_be_read_at_every_width(session: PageSession, count: int):
    frame = dict(machine(count, 2))
    last = frame["snapshot"]["devices"][-1]["uuid"]
    about = {"kind": "out-of-memory", "summary": "", "form": "", "evidence": [], "fit": None}
    subject = {"device_uuid": last, "pid": None, "start_ticks": None, "since": frame["snapshot"]["taken_at"]}
    frame["verdicts"] = [about | subject | {"time_to_full_seconds": None}]
    cut = """all => all.filter(one => one.checkVisibility()).flatMap(one => {
        const text = document.createRange();
        text.selectNodeContents(one);
        const cell = one.closest('th, td').getBoundingClientRect();
        return text.getBoundingClientRect().right > cell.right + 0.5 ? [one.textContent] : [];
    })"""
    show(session, frame)
    for width in (390, 768, 1440, 1920):
        session.page.set_viewport_size({"width": width, "height": 900})
        names = "#device-rows th button > span, #device-rows td:last-child"
        assert session.page.locator("#device-rows th button").count() == count
        assert session.page.locator(names).evaluate_all(cut) == [], width
        assert session.fits()


def test_problem_has_the_color_of_its_severity(session: PageSession):
    frame = dict(machine(2, 2))
    keys = ("device_uuid", "pid", "start_ticks")
    full, idle = ({key: process[key] for key in keys} for process in (frame["processes"][0], frame["processes"][-1]))
    about = {"kind": "idle-holder", "summary": "", "form": "", "evidence": [], "fit": None, "since": 1.0}
    frame["verdicts"] = [about | idle | {"time_to_full_seconds": None}]
    frame["alerts"] = [
        {"rule": rule, "phase": "firing", "active_at": 1.0, "fired_at": 1.0, "value": 1.0, "silenced_by": []}
        | {"pid": subject["pid"], "start_ticks": subject["start_ticks"], "annotations": []}
        | {"labels": [["uuid", subject["device_uuid"]], ["severity", severity]]}
        for rule, subject, severity in (("out-of-memory", full, "critical"), ("idle-holder", idle, "info"))
    ]
    show(session, frame)
    colors = """([place, text]) => [...document.querySelectorAll(place)].filter(one => one.textContent === text)
        .map(one => getComputedStyle(one).color)"""
    places = {".card .what b": "card", "#processes .of-verdict": "row", "#device-rows td:last-child": "device"}
    found = {
        (name, kind): session.page.evaluate(colors, [place, kind])
        for place, name in places.items()
        for kind in ("out-of-memory", "idle-holder")
    }
    assert found["row", "out-of-memory"] == found["device", "out-of-memory"] == found["card", "out-of-memory"] != []
    assert found["row", "idle-holder"] == found["card", "idle-holder"] != []
    assert found["card", "idle-holder"] != found["card", "out-of-memory"]


def test_64_devices_are_tiles_and_few_of_3200_rows_are_drawn(session: PageSession):
    frame, page = machine(64, 50), session.page
    show(session, frame)
    page.wait_for_function("() => document.querySelectorAll('tbody.process').length > 3")
    assert page.locator("#tiles button").count() == 64
    device = frame["snapshot"]["devices"][37]
    used = round(100 * device["used_bytes"] / device["size_bytes"])
    assert page.get_by_role("button", name="GPU 37, ").get_attribute("aria-label") == f"GPU 37, {used}% used"
    assert page.evaluate(NODES) <= MAX_NODES
    assert page.locator("tbody.process").count() <= MAX_ROWS
    assert page.locator("#processes").get_attribute("aria-rowcount") == "3201"
    largest = sorted(range(1, 3201), reverse=True)
    place_and_pid = """() => {
        const row = document.activeElement.closest('tbody');
        const [inner, head] = [row, document.querySelector('#columns')].map(node => node.getBoundingClientRect());
        const seen = inner.top >= head.bottom - 1 && inner.bottom <= innerHeight + 1;
        return [Number(row.firstChild.ariaRowIndex) - 2, Number(row.querySelector('.of-pid').textContent), seen];
    }"""
    page.locator("tbody.process .of-program button").first.focus()
    for key, place in (("End", 3199), ("ArrowUp", 3198), ("PageUp", 3188), ("Home", 0), ("j", 1), ("j", 2), ("k", 1)):
        page.keyboard.press(key)
        assert page.evaluate(place_and_pid) == [place, largest[place], True], key
        assert page.locator("tbody.process").count() <= MAX_ROWS
    page.evaluate("""() => {
        const height = document.querySelector('tbody.process tr').offsetHeight;
        const start = document.querySelector('#processes tbody').getBoundingClientRect().top + scrollY;
        scrollTo(0, start + 1368 * height);
    }""")
    page.locator("tr[aria-rowindex='1370']").wait_for()
    assert page.evaluate(place_and_pid)[:2] == [1, largest[1]], "the row with the focus is kept"
    assert page.evaluate(NODES) <= MAX_NODES
    page.keyboard.press("ArrowDown")
    assert page.evaluate(place_and_pid) == [2, largest[2], True]
    page.get_by_role("button", name="Events").click()
    page.wait_for_function("() => document.querySelector('#events').getBoundingClientRect().top < innerHeight")
    assert page.evaluate("getComputedStyle(document.querySelector('.rows')).overflowY") == "visible"
    page.get_by_label("Filter").fill("user2 w6")
    session.shows("400 of 3200")
    assert set(session.texts("tbody.process .of-user")[0]) == {"user2"}
    page.get_by_label("Filter").fill("")
    page.get_by_role("button", name="GPU 37, ").click()
    session.shows("50 of 3200")
    used = {each["pid"]: each["used_bytes"] for each in frame["processes"] if each["device_uuid"] == "GPU-37"}
    first = page.locator("tbody.process").first
    assert first.locator(".of-gpu").inner_text() == "37"
    assert used[int(first.locator(".of-pid").inner_text())] == max(used.values())


@pytest.mark.parametrize("viewport", [None, PHONE], ids=["wide", "phone"])
def test_groups_are_unfolded_and_accessible(browser: Browser, demo: RunningDaemon, viewport: Any):
    with open_page(browser, demo, viewport) as session:
        page = session.page
        show(session, machine(8, 64))
        page.get_by_label("Group by").select_option("user")
        assert session.texts("#shown") == [["4 groups"]]
        page.get_by_role("button", name="user3").click()
        page.locator("tbody.process").first.wait_for()
        assert session.address().endswith("#group=user")
        assert session.fits()
        if AXE:
            page.evaluate(AXE.read_text())
            assert page.evaluate(CHECK) == []
