"""Programs are compared with one another, with a moment of their past, and with their life before a restart."""

from __future__ import annotations

import os
import re
import signal
from typing import TYPE_CHECKING, Any

import pytest

from gpumond.facts.shares import SHARES
from gpumond.facts.units import size_text
from tests.helpers.browser import LIVE, PHONE, PageSession, check_access, needs_chromium, open_page, show_frame
from tests.helpers.curves import MIB
from tests.helpers.running import RunningDaemon, until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Route

pytestmark = [needs_chromium, pytest.mark.timeout(180)]
ROWS = """label => [...document.querySelectorAll(`table[aria-label="${label}"] tbody tr`)].map(
    row => [...row.children].map(cell => cell.textContent))"""


LINES = """all => all.map(line => {
    const last = line.getPointAtLength(line.getTotalLength()).y
    const top = Math.max(...all.map(each => 100 - each.getPointAtLength(each.getTotalLength()).y))
    return [100 - last, top, getComputedStyle(line).strokeDasharray]
})"""


@pytest.fixture(autouse=True)
def past(demo: RunningDaemon) -> None:
    """Wait until each program has a history, and moments, which are whole seconds, differ."""
    until(lambda: demo.get("frame")["snapshot"]["elapsed_seconds"] > 10)


def rows(session: PageSession, label: str) -> list[list[str]]:
    session.page.get_by_role("table", name=label).locator("tbody tr").first.wait_for()
    found: list[list[str]] = session.page.evaluate(ROWS, label)
    return found


def moments(session: PageSession) -> list[str]:
    return [field.input_value() for field in session.page.get_by_role("textbox", name="moment").all()]


def of(frame: Any, workload: str) -> Any:
    (process,) = (each for each in frame["processes"] if each["workload"] == workload)
    return process


def texts(one: int | None, other: int | None) -> list[str]:
    """Return two sizes and their difference; an unknown one is ``-``."""
    more = None if one is None or other is None else other - one
    shown = ["-" if each is None else size_text(each) for each in (one, other, more)]
    return [*shown[:2], f"+{shown[2]}" if more and more > 0 else shown[2]]


def test_programs_are_compared_with_one_another(session: PageSession, demo: RunningDaemon):
    frame, page = demo.get("frame"), session.page
    of(frame, "train-llm")["opaque_bytes"] = None  # beside live memory, none
    of(frame, "etl")["opaque_bytes"] = 488 * MIB
    page.goto("about:blank")  # a change of the part after # would load the page a second time
    page.goto(f"{demo.url}/#view=compare&compare=0:train-llm,0:etl")
    show_frame(session, frame)
    one, other = of(frame, "train-llm") | {"opaque_bytes": 0}, of(frame, "etl")
    expected = [
        [share, *texts(one[name], other[name])]
        for share in ("used", *SHARES[:5])
        for name in [f"{share}_bytes"]
        if one[name] or other[name]
    ]
    assert rows(session, "Differences between programs") == expected
    assert expected[-1] == ["opaque", "0 B", "488.0 MiB", "+488.0 MiB"]
    now = {(share, name): value for share, name, _, value, _ in rows(session, "Differences between two moments")}
    names = [f"{each['workload']} (pid {each['pid']})" for each in (one, other)]
    for share, *values in expected:
        assert [now.get((share, name), "0 B") for name in names] == [value.replace("-", "0 B") for value in values[:2]]
    tops = page.locator(".compared .plot").evaluate_all(
        "all => all.map(plot => [...plot.querySelectorAll('.level')].map(line => line.textContent + line.style.top))"
    )
    assert len(tops) == 3  # both together, and each
    assert tops[0] == tops[1] == tops[2]
    lines = page.locator(".plot path.series").evaluate_all(LINES)
    assert len({dash for _, _, dash in lines}) == 2
    for (end, top, _), each in zip(lines, (one, other), strict=True):
        assert end / top == pytest.approx(each["used_bytes"] / max(one["used_bytes"], other["used_bytes"]), abs=0.02)
    page.unroute(LIVE)


def test_program_that_uses_nothing_has_nothing_of_each_share(session: PageSession, demo: RunningDaemon):
    frame, page = demo.get("frame"), session.page
    suspended = dict.fromkeys((f"{share}_bytes" for share in SHARES[:5]), None)
    of(frame, "etl").update(suspended | {"used_bytes": 0})
    page.goto("about:blank")
    page.goto(f"{demo.url}/#view=compare&compare=0:train-llm,0:etl")
    show_frame(session, frame)
    found = {share: values for share, *values in rows(session, "Differences between programs")}
    live = of(frame, "train-llm")["live_bytes"]
    assert found["live"] == texts(live, 0)
    page.unroute(LIVE)


def test_program_has_no_values_before_its_start(session: PageSession, demo: RunningDaemon):
    frame, page = demo.get("frame"), session.page
    of(frame, "etl").update(pid=1, start_ticks=7, started_at=frame["snapshot"]["taken_at"])
    page.goto("about:blank")
    page.goto(f"{demo.url}/#view=compare&compare=0:train-llm,0:etl&moment=1")
    show_frame(session, frame)
    changed = rows(session, "Differences between two moments")
    assert {(before, more) for _, name, before, _, more in changed if name.startswith("etl")} == {("-", "-")}
    page.unroute(LIVE)


def test_ended_program_stays_and_the_first_moment_is_the_held_one(session: PageSession, demo: RunningDaemon):
    frame, page = demo.get("frame"), session.page
    gone, at = of(frame, "etl"), frame["snapshot"]["taken_at"] - 2
    frame["processes"].remove(gone)
    ended = {"id": 1, "at": at, "kind": "process-ended", "summary": "", "details": []}
    ended |= {key: gone[key] for key in ("device_uuid", "pid", "start_ticks", "workload")}
    page.goto("about:blank")
    page.goto(f"{demo.url}/#view=compare&compare=0:train-llm,0:etl&at={at}")
    show_frame(session, frame, [ended])
    found = {share: values for share, *values in rows(session, "Differences between programs")}
    assert found["used"] == texts(of(frame, "train-llm")["used_bytes"], 0)
    assert session.texts(".chosen bdi") == [["train-llm", "etl"]]
    first, _ = moments(session)
    page.get_by_text(f"Ended {first}", exact=True).wait_for()
    page.unroute(LIVE)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_address_carries_programs_and_moment(browser: Browser, demo: RunningDaemon, scheme: str):
    with open_page(browser, demo, color_scheme=scheme) as session:
        page = session.page
        page.get_by_role("button", name="Compare", exact=True).click()
        offer = page.get_by_label("Add a program")
        for workload in ("chat-api", "notebook", "etl"):
            option = offer.locator("option", has_text=re.compile(f"^{workload} "))
            offer.select_option(option.get_attribute("value"))
            page.get_by_role("button", name=f"Remove {workload}").wait_for()
        page.get_by_role("columnheader", name="less chat-api").nth(1).wait_for()
        assert session.fits()
        page.get_by_role("button", name="Remove notebook").click()
        page.get_by_role("columnheader", name="Difference").first.wait_for()
        page.locator(".compared .plot").nth(1).click(position={"x": 100, "y": 50})
        page.wait_for_function("() => /moment=/.test(location.hash)")
        page.locator(".compared .plot").nth(1).click(position={"x": 300, "y": 50}, modifiers=["Shift"])
        page.wait_for_function("() => /until=/.test(location.hash)")
        at, end = moments(session)
        assert at < end != "now"
        page.get_by_role("heading", name=f"Between {at} and {end}").wait_for()
        page.get_by_role("heading", name=f"Between programs, at {end}").wait_for()
        assert "compare=0%3Achat-api%2C0%3Aetl" in session.address()
        check_access(session)
        page.set_viewport_size(PHONE)
        assert session.fits()
        other = PageSession(page.context, session.address())
        other.page.get_by_role("table", name="Differences between two moments").wait_for()
        assert moments(other) == [at, end]
        assert other.texts(".chosen bdi") == [["chat-api", "etl"]]
        assert other.complaints == []


def test_values_at_a_moment_are_those_of_its_reading(session: PageSession, demo: RunningDaemon):
    """The charts have blocks of a longer range, which are others later."""

    def doubled(route: Route) -> None:
        answer = route.fetch().json()
        route.fulfill(json=answer | {"used": [2 * used for used in answer["used"]]})

    page = session.page
    page.route("**/api/v1/history/shares?*", doubled)
    first, last = (int(demo.get("frame")["snapshot"]["taken_at"]) - ago for ago in (6, 3))
    page.goto("about:blank")
    page.goto(f"{demo.url}/#view=compare&compare=0:train-llm,0:etl&moment={first}&until={last}")
    held = [{each["name"]: each for each in demo.get(f"history/moment?at={at}")["holdings"]} for at in (first, last)]
    names = ("train-llm", "etl")
    (used, *between), *_ = rows(session, "Differences between programs")
    assert (used, between) == ("used", texts(*(round(held[1][name]["used_bytes"]) for name in names)))
    changed = {
        (share, name.split()[0]): values for share, name, *values in rows(session, "Differences between two moments")
    }
    for name in names:
        assert changed["used", name] == texts(*(round(each[name]["used_bytes"]) for each in held))
        assert changed["live", name] == texts(*(round(each[name]["live_bytes"]) for each in held))
    page.unroute("**/api/v1/history/shares?*")


def test_link_shows_its_moment_when_that_is_older_than_the_usual_range(session: PageSession, demo: RunningDaemon):
    at = demo.get("frame")["snapshot"]["taken_at"] - 1000
    requested = re.compile(rf"history/shares\?since={int(at) - 60}&")
    session.page.goto("about:blank")
    with session.page.expect_request(requested):
        session.page.goto(f"{demo.url}/#view=compare&compare=0:train-llm&moment={int(at)}")


def test_links_to_other_views_have_no_compared_moments(session: PageSession, demo: RunningDaemon):
    page = session.page
    at = int(demo.get("frame")["snapshot"]["taken_at"]) - 3
    page.goto("about:blank")
    page.goto(f"{demo.url}/#view=compare&compare=0:etl&moment={at}&until={at + 1}")
    page.get_by_role("table", name="Differences between two moments").wait_for()
    page.get_by_role("button", name="Queue").click()
    assert session.address().partition("#")[2] == "view=queue&compare=0%3Aetl"
    page.get_by_role("button", name="Compare", exact=True).click()
    page.wait_for_function(f"() => location.hash.includes('moment={at}&until={at + 1}')")


def test_moment_that_the_charts_do_not_show_is_refused(session: PageSession):
    page = session.page
    page.get_by_role("button", name="Compare etl").click()
    page.keyboard.press("c")
    page.get_by_role("table", name="Differences between two moments").wait_for()
    page.keyboard.press("m")
    at, _ = moments(session)
    for text in ("yesterday", "25", "99:99"):
        page.keyboard.type(text)
        page.keyboard.press("Enter")
        refusal = page.evaluate("document.activeElement.validationMessage")
        assert re.fullmatch(r"Type a time from [\d:]{8} to [\d:]{8}, or now\.", refusal)
        page.keyboard.press("Control+a")
    assert "moment=" not in session.address()
    page.keyboard.type(at)
    page.keyboard.press("Tab")  # as Enter does, without going to the second moment
    page.wait_for_function("() => /moment=/.test(location.hash)")
    assert moments(session)[0] == at
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("ArrowLeft")
    before, _ = moments(session)
    seconds = page.evaluate("times => times.map(time => new Date(`1/1/2000 ${time}`) / 1000)", [before, at])
    assert seconds[1] - seconds[0] == 1


def test_restarted_program_is_compared_with_its_earlier_life(session: PageSession, demo: RunningDaemon):
    page = session.page
    frame = demo.get("frame")
    before, other = (of(frame, name) for name in ("chat-api", "etl"))
    first, last = (int(frame["snapshot"]["taken_at"]) - ago for ago in (4, 2))
    page.get_by_role("button", name="Compare chat-api").click()
    page.get_by_role("button", name="Compare 1").click()
    page.get_by_role("heading", name=f"chat-api (pid {before['pid']})").wait_for()
    for each in (before, other):
        os.kill(each["pid"], signal.SIGKILL)

    def restarted() -> Any:
        found = [each for each in demo.get("processes") if each["workload"] == "chat-api" and each["live_bytes"]]
        return found and found[0]["pid"] != before["pid"] and found[0]

    row = until(restarted)
    page.get_by_role("heading", name=f"chat-api (pid {row['pid']})").wait_for()
    page.get_by_text(re.compile(f"Pid {before['pid']} until ")).wait_for()
    until(lambda: any(each["workload"] == "etl" for each in demo.get("processes")))
    offered = page.get_by_label("Add a program").locator(
        "option", has_text=f"etl (pid {of(demo.get('frame'), 'etl')['pid']})"
    )
    offered.wait_for(state="attached")
    both = f"chat-api (pid {before['pid']}, then {row['pid']})"
    used, *_ = rows(session, "Differences between two moments")
    assert used[1] in (both, f"chat-api (pid {row['pid']})")
    page.evaluate("location.hash += '&moment=1'")  # the first one
    used, *_ = rows(session, "Differences between two moments")
    assert used[:2] == ["used", both]
    assert used[2] != "-"
    page.goto("about:blank")
    page.goto(f"{demo.url}/#view=compare&compare=0:chat-api,0:etl&moment={first}&until={last}")
    earlier = [f"{each['workload']} (pid {each['pid']})" for each in (before, other)]
    for name in earlier:
        page.get_by_role("columnheader", name=name).wait_for()
    assert {name for _, name, *_ in rows(session, "Differences between two moments")} == set(earlier)
    page.get_by_role("button", name="Overview").click()
    frame = demo.get("frame")
    events = page.request.get(f"{demo.url}/api/v1/events", headers={"Accept": "application/json"}).json()
    frame["snapshot"]["elapsed_seconds"] = frame["snapshot"]["taken_at"] - before["started_at"] - 1
    show_frame(session, frame, events)
    page.get_by_label("Change in").select_option("15 min")
    cell = page.locator("tbody.process", has_text="chat-api").locator(".of-change")
    cell.get_by_text("↻").wait_for(timeout=15_000)
    assert f"from pid {before['pid']}, before the workload's restart" in (cell.get_attribute("title") or "")
