"""History charts in a real Chromium."""

from __future__ import annotations

import csv
import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import TypeAdapter

from gpumond.facts.frame import Verdict
from gpumond.facts.shares import SHARES
from gpumond.facts.units import size_text
from gpumond.serve.examples import VERDICT
from tests.helpers.browser import LIVE, PageSession, needs_chromium, open_page, show_frame, stream_of
from tests.helpers.running import RunningDaemon, until

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [needs_chromium, pytest.mark.timeout(180)]


LONG_RANGES = {"1 h": 3600, "6 h": 21600, "24 h": 86400}
"""Ranges that begin before the daemon: the shortest one begins with it."""


def drawn(session: PageSession, seconds: str) -> None:
    session.page.locator(f".device .plot[data-range='{seconds}'] svg").wait_for()


def test_chart_shows_the_chosen_range_up_to_now(session: PageSession):
    page = session.page
    for name, seconds in LONG_RANGES.items():
        page.locator(".device").get_by_role("button", name=name).click()
        drawn(session, str(seconds))
        page.locator(".device .unknown").get_by_text("daemon started").wait_for()
        edges, path = page.evaluate("""() => {
            const edge = node => { const box = node.getBoundingClientRect(); return [box.left, box.right]; };
            const find = query => document.querySelector(query);
            const [plot, unknown] = ['.device .plot', '.device .unknown'].map(query => edge(find(query)));
            return [[plot, unknown], document.querySelector('.device path.used').getAttribute('d')];
        }""")
        (left, right), (begins, ends) = edges
        segments = [[tuple(map(float, point.split())) for point in one.split("L")] for one in path.split("M")[1:]]
        points = [point for segment in segments for point in segment]
        assert begins == pytest.approx(left, abs=1)
        assert points[0][0] / 1000 == pytest.approx((ends - left) / (right - left), abs=0.01), name
        assert points[-1][0] == pytest.approx(1000, abs=0.1), "up to now"
        steps = (step for segment in segments for step in pairwise(segment))  # a gap separates two segments
        assert all(one[0] == other[0] or one[1] == other[1] for one, other in steps), "steps"


def test_chart_is_zoomed_and_its_crosshair_is_that_of_all_charts(session: PageSession):
    page = session.page
    page.get_by_role("button", name="notebook", exact=True).click()
    plot = page.locator(".device .plot")
    drawn(session, "900")
    page.locator("tbody .plot[data-range]").wait_for()
    readout = page.locator(".device .readout").get_by_text("used (driver)")

    def pointed() -> bool:
        width = plot.evaluate("plot => plot.clientWidth")
        plot.hover(position={"x": width - 3, "y": 40})  # again, if a new verdict has moved the plot
        return readout.is_visible()

    until(pointed, every=0.2)
    box = plot.bounding_box()
    assert box
    device, process = session.texts(".device .readout", "tbody .readout")
    assert device[0].split(": ")[0] == process[0].split(": ")[0]
    assert page.locator(".cursor:visible").count() == 2
    at, middle = box["y"] + 40, box["x"] + box["width"] / 2
    page.mouse.move(middle, at)
    page.mouse.down()
    page.mouse.move(middle + box["width"] / 4, at)
    page.mouse.up()
    page.wait_for_function("() => /range=\\d+-\\d+/.test(location.hash)")
    first, last = map(int, re.findall(r"range=(\d+)-(\d+)", session.address())[0])
    assert 10 <= last - first <= 230, "a quarter of what is shown, which is at most 15 min"
    drawn(session, f"{first}-{last}")
    other = PageSession(page.context, session.address())
    drawn(other, f"{first}-{last}")
    other.page.close()
    plot.focus()
    page.keyboard.press("Escape")
    drawn(session, "900")
    page.keyboard.press("+")
    page.locator(".device .plot:not([data-range='900'])").wait_for()
    plot.dblclick()
    drawn(session, "900")

    def zoomed() -> bool:
        plot.hover()  # again, if a new verdict has moved the plot
        page.mouse.wheel(0, -100)
        return plot.get_attribute("data-range") != "900"

    until(zoomed, every=0.2)


FITS_IN_LIST = """() => {
    const [alerts, problems] = ['alerts', 'problems'].map(id => document.getElementById(id));
    return alerts.scrollHeight <= alerts.clientHeight + 1 && problems.scrollHeight <= problems.clientHeight + 1;
}"""


def test_evidence_of_a_leak_is_drawn(browser: Browser, demo: RunningDaemon):
    verdict = TypeAdapter(Verdict).dump_python(VERDICT, mode="json")
    fit = verdict["fit"]
    fit |= {key: fit["at"] + seconds for key, seconds in (("full_at", 300), ("full_at_latest", 310))}

    def with_leak(frame: Any) -> None:
        uuid = frame["snapshot"]["devices"][0]["uuid"]
        frame["verdicts"] = [
            verdict | {"device_uuid": uuid, "retained_by": "retained by `losses` in `train` at train.py:42"}
        ]

    with open_page(browser, demo, rewrite=with_leak) as session:
        page = session.page
        sentence = page.get_by_text(re.compile("train .+ is leaking")).first
        sentence.wait_for()
        assert "train (pid 4242) is leaking" in sentence.inner_text()
        assert re.search(r"\(since \d\d:58:20\)", sentence.inner_text()), "in the browser's time zone"
        session.shows("full in about 65 min")
        page.get_by_role("button", name=re.compile("Evidence leak")).click()
        page.locator(".fit svg").wait_for()
        paths = dict(
            page.evaluate("""() => [...document.querySelectorAll('.fit path')].map(
            path => [path.className.baseVal, path.getAttribute('d')])""")
        )
        (text,), refused = session.texts(".fit[open] p:not(.next)", ".fit[open] .ruled-out li")
        (following,), (top,) = session.texts(".fit[open] .next", ".fit[open] .plot .top")
        assert page.evaluate(FITS_IN_LIST)
        page.get_by_role("button", name=re.compile("Evidence leak")).click()
        page.locator(".fit[open]").wait_for(state="detached")
    assert paths["points"].count("M") == len(fit["points"])
    assert {"band", "line", "projection", "full", "crossing"} <= paths.keys()
    assert text.startswith("32.0 MiB/min (31.6 MiB to 32.4 MiB) in the 2 min shown; the GPU would be full by now.")
    assert following.startswith("Retained by losses in train at train.py:42. Next: find out what retains")
    assert top.endswith(" of this program: the GPU is full")
    assert refused == ["Ruled out: warm-up (last half's slope relative to the first half's: 0.99)."]


def test_chart_of_the_past_states_what_it_lacks(session: PageSession, demo: RunningDaemon):
    frame, page = demo.get("frame"), session.page
    at = frame["snapshot"]["taken_at"]
    for process in frame["processes"]:
        process.update(pid=process["pid"] + 10**6, started_at=at)
    event = {
        "kind": "alert-resolved",
        "at": at - 20,
        "device_uuid": None,
        "pid": None,
        "start_ticks": None,
        "summary": "",
        "details": [],
    }
    events = [event | {"id": number} for number in range(250)]
    page.route(LIVE, lambda route: route.fulfill(**stream_of(frame, events)))
    page.goto(f"{demo.url}/#range={int(at) - 60}-{int(at) - 10}&open=0:etl")  # the page reloads itself
    session.shows("No data for this range.")
    session.shows("process started")
    session.shows("t marked.")
    page.locator("#hero.past").wait_for()
    page.unroute(LIVE)


def test_older_events_are_listed_on_request(session: PageSession, demo: RunningDaemon):
    frame, page = demo.get("frame"), session.page
    about = dict.fromkeys(("device_uuid", "pid", "start_ticks")) | {"kind": "alert-fired", "details": []}
    events = [about | {"id": at, "at": 1.0 + at, "summary": f"event {at}"} for at in range(1, 251)]
    page.route("**/api/v1/events", lambda route: route.fulfill(json=events))
    show_frame(session, frame, events[-200:])
    older = page.get_by_role("button", name="Show older events")
    assert page.locator("#events li").count() == 60
    older.click()
    page.locator("#events").get_by_text("event 1", exact=True).wait_for()
    assert page.locator("#events li").count() == 250
    assert not older.is_visible()
    page.unroute(LIVE)


def test_range_says_what_a_young_daemon_has_of_it(session: PageSession, demo: RunningDaemon):
    frame, page = demo.get("frame"), session.page
    (device,) = frame["snapshot"]["devices"]
    frame["snapshot"]["devices"].append(device | {"uuid": "GPU-other", "index": 1})
    for elapsed, shown, line in ((130.0, "2 min", "3 min"), (1000.0, "15 min", "15 min")):
        frame["snapshot"]["elapsed_seconds"] = elapsed
        show_frame(session, frame)
        page.locator("#hero .ranges [aria-pressed=true]", has_text=re.compile(f"^{shown}$")).wait_for()
        assert session.texts("#spark-head") == [[line]]
        page.unroute(LIVE)


def test_near_marks_are_the_most_urgent_one_with_the_number_of_causes(session: PageSession, demo: RunningDaemon):
    frame, page = demo.get("frame"), session.page
    at = frame["snapshot"]["taken_at"] - 60
    frame["snapshot"]["elapsed_seconds"] = 1000.0
    (device,) = frame["snapshot"]["devices"]
    about = {"device_uuid": device["uuid"], "pid": None, "start_ticks": None, "workload": "", "details": []}
    kinds = ("agent-connected", "alert-fired", "agent-disconnected")
    events = [about | {"id": n, "at": at + 4 * n, "kind": kind, "summary": kind} for n, kind in enumerate(kinds)]
    for n, (kind, name) in enumerate(
        {"verdict-began": "verdict", "alert-fired": "rule"}.items(), len(events)
    ):  # one cause
        of = {"pid": 7, "start_ticks": 1, "details": [[name, "leak"]]}
        events.append(about | of | {"id": n, "at": at + 6, "kind": kind, "summary": kind})
    events.append(about | {"id": len(events), "at": at + 7, "kind": "flush", "summary": "flush"})
    show_frame(session, frame, events)
    mark, flush = page.locator("#hero .marks li:not(.flush)"), page.locator("#hero .marks li.flush")
    mark.wait_for()
    assert (mark.locator("span").inner_text(), mark.locator("small").inner_text()) == ("▲", "4")
    assert (flush.locator("span").inner_text(), flush.locator("small").inner_text()) == ("▼", "")
    assert page.locator("#hero .plot").get_attribute("data-range") == "900"
    for node, seconds in ((mark, 56), (flush, 53)):
        place = float(node.evaluate("node => parseFloat(node.style.left)"))
        assert place == pytest.approx(100 * (1 - seconds / 900), abs=0.02)
    boxes = "nodes => nodes.map(node => node.getBoundingClientRect()).map(({ top, bottom }) => [top, bottom])"
    (_, bottom), (top, _) = page.locator("#hero .marks li span").evaluate_all(boxes)
    assert top >= bottom - 1, "flushes are below other signs"
    page.unroute(LIVE)


def test_summary_says_since_when(session: PageSession):
    summary = session.page.locator("#hero .summary", has_text=re.compile(r" since \d\d:\d\d:\d\d, most recently "))
    summary.wait_for()
    assert "in the last" not in summary.inner_text(), "the pressed button states the range"


def test_rows_of_the_legend_are_equally_high(session: PageSession):
    session.page.locator("#hero .legend div").first.wait_for()
    rows = session.page.locator("#hero .legend div:visible")
    assert len(set(rows.evaluate_all("all => all.map(row => row.offsetHeight)"))) == 1


def test_legend_shows_the_values_at_the_crosshair(session: PageSession):
    page = session.page
    plot = page.locator("#hero .plot")
    plot.locator("svg").wait_for()
    box = plot.bounding_box()
    assert box
    legend = """() => [document.querySelector('#hero .side').dataset.at,
        document.querySelector('#hero .readout').textContent,
        ...['live', 'overhead', 'free'].map(share => [...document.querySelectorAll('#hero .legend div')].find(
            entry => entry.firstChild.textContent === share).lastChild.textContent)]"""
    at, text, *now = page.evaluate(legend)
    assert (at, text) == ("", "")
    assert "-" not in now
    page.mouse.move(box["x"] + 0.995 * box["width"], box["y"] + 50)
    page.locator("#hero .readout", has_text="live").wait_for()
    at, text, live, overhead, free = page.evaluate(legend)
    assert text.startswith(f"{at}: used")
    assert f"live {live}," in text
    assert f"overhead {overhead}" in text
    assert free != "-"
    page.mouse.move(0, 0)
    page.locator("#hero .side[data-at='']").wait_for()
    assert page.evaluate(legend)[-1] != "-"


def test_clicked_moment_stays_until_escape(session: PageSession, demo: RunningDaemon):
    page = session.page
    plot = page.locator("#hero .plot")
    plot.locator("svg").wait_for()
    until(lambda: demo.get("frame")["snapshot"]["elapsed_seconds"] > 10)  # the moment has a reading
    frame = demo.get("frame")
    for process in frame["processes"]:
        process.update(live_bytes=0)
    show_frame(session, frame)
    page.locator("#hero .edge[aria-label]:not([aria-label*=live])").wait_for()
    heads = """() => ['problems', 'processes', 'events'].map(
        (name) => getComputedStyle(document.getElementById(`${name}-title`), '::after').content)"""
    assert page.evaluate(heads) == ["none"] * 3
    width = plot.evaluate("plot => plot.clientWidth")
    plot.click(position={"x": 0.9 * width, "y": 60})
    page.mouse.move(0, 0)
    held = page.locator("#hero .side").get_attribute("data-at")
    assert held
    session.shows(f"{held}: used (driver)")
    live = page.locator("#hero .legend div", has_text="live").locator("dd").inner_text()
    bar = page.locator("#hero .edge").get_attribute("aria-label")
    assert bar
    assert f"live {live}" in bar, "the bar is that of the moment, too"
    page.get_by_role("heading", name=f"Processes at {held}").wait_for()
    assert page.evaluate(heads) == ['" now"', "none", "none"], "events have times of their own"
    sizes = page.locator("#processes tbody:first-of-type td.of-live").all_inner_texts()
    assert sizes != ["0 B"], "the table is that of the moment, too"
    assert page.locator("#hero .total").evaluate("node => getComputedStyle(node, '::after').content") == '" now"'
    page.locator("#hero .estimate").wait_for(state="hidden")
    plot.hover(position={"x": 0.5 * width, "y": 60})
    page.mouse.move(0, 0)
    assert page.locator("#hero .side").get_attribute("data-at") == held
    page.keyboard.press("Escape")
    page.locator("#hero .side[data-at='']").wait_for()
    page.locator("#hero .edge[aria-label]:not([aria-label*=live])").wait_for()
    page.get_by_role("heading", name="Processes", exact=True).wait_for()
    assert page.evaluate(heads) == ["none"] * 3
    plot.click(position={"x": 0.9 * width, "y": 60})
    page.get_by_role("button", name="Show now").click()
    page.locator("#processes tbody button:focus").wait_for()
    page.get_by_role("heading", name="Processes", exact=True).wait_for()
    plot.hover(position={"x": 0.5 * width, "y": 60})
    assert page.evaluate(heads) == ['" now"', '" now"', "none"], "only a moment that is held is requested"
    plot.click(position={"x": 0.9 * width, "y": 60})
    plot.click(position={"x": 0.8 * width, "y": 60})
    earlier = page.locator("#hero .side").get_attribute("data-at")
    assert earlier
    assert earlier < held, "another moment is held"
    page.get_by_role("heading", name=f"Processes at {earlier}").wait_for()
    for _ in range(4):  # more than a second
        page.keyboard.press("ArrowLeft")
    page.mouse.move(0, 0)
    moved = page.locator("#hero .side").get_attribute("data-at")
    assert moved
    assert moved < earlier
    page.get_by_role("heading", name=f"Processes at {moved}").wait_for()
    plot.click(position={"x": 0.8 * width, "y": 60})
    plot.click(position={"x": 0.8 * width, "y": 60}, delay=600)
    page.mouse.move(0, 0)
    page.locator("#hero .side[data-at='']").wait_for()
    page.unroute(LIVE)


def test_link_shows_the_held_moment(session: PageSession, demo: RunningDaemon):
    page = session.page
    plot = page.locator("#hero .plot")
    plot.locator("svg").wait_for()
    until(lambda: demo.get("frame")["snapshot"]["elapsed_seconds"] > 10)
    plot.click(position={"x": 0.8 * plot.evaluate("plot => plot.clientWidth"), "y": 60})
    heading = page.get_by_role("heading", name=re.compile(r"Processes at \d"))
    heading.wait_for()
    held = heading.inner_text()
    page.wait_for_function("() => /at=\\d+\\.\\d+&range=\\d+-\\d+$/.test(location.hash)")
    link = session.address()
    at = link.split("at=")[1].split("&")[0]
    device, *_ = demo.get(f"history/moment?at={at}")["holdings"]
    readout = page.locator("#hero .readout", has_text=f"used (driver) {size_text(device['used_bytes'])} of ")
    readout.get_by_text(f", live {size_text(device['live_bytes'])}, ").wait_for()
    shown = readout.inner_text()
    page.goto("about:blank")
    page.goto(link)
    page.get_by_role("heading", name=held).wait_for()
    page.locator("#hero .readout").get_by_text(shown, exact=True).wait_for()
    page.locator("#hero .plot").focus()
    page.keyboard.press("Escape")
    page.get_by_role("heading", name="Processes", exact=True).wait_for()
    page.wait_for_function("() => location.hash === ''")


def test_each_row_of_a_charts_csv_adds_up_to_the_size(session: PageSession, demo: RunningDaemon):
    drawn(session, "900")
    (device,) = demo.get("devices")
    with session.page.expect_download() as saved:
        session.page.locator(".device").get_by_role("button", name="CSV of the chart").click()
    assert re.fullmatch(r"gpumond-gpu-0-\d{8}T\d{6}Z\.csv", saved.value.suggested_filename)
    rows = list(csv.DictReader(saved.value.path().read_text().splitlines()))
    assert len(rows) > 5
    for row in rows:
        shares = sum(float(row[f"{share}_bytes"] or 0) for share in SHARES if f"{share}_bytes" in row)
        overcount, free, reserved = (float(row[f"{name}_bytes"]) for name in ("overcount", "free", "reserved"))
        assert shares - overcount + free + reserved == device["size_bytes"] == float(row["size_bytes"])
        assert (row["gpu"], row["device_uuid"]) == ("0", device["uuid"])
