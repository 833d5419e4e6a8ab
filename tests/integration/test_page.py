"""The page in a real Chromium, with real daemons."""

from __future__ import annotations

import csv
import itertools
import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args
from urllib.parse import parse_qs, urlsplit

import pytest

from gpumond.events import EventKind
from gpumond.facts.units import size_text
from gpumond.features.flush.routes import FLUSH_EXAMPLE, FLUSH_RESPONSE
from gpumond.features.quotas.command import LIMIT_KEYS
from gpumond.serve.examples import RECEIPT
from gpumond.view.text import size_or_dash
from tests.helpers.agents import GIB
from tests.helpers.browser import LIVE, PROGRAMS, PageSession, needs_chromium, open_page, show_frame, sign_in
from tests.helpers.curves import MIB
from tests.helpers.running import RunningDaemon, until
from tests.integration.faces import command, consistent_frame, disagreements, of_command, serving_frame

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Route

pytestmark = [needs_chromium, pytest.mark.timeout(180)]
SHARES = ("live", "cached", "stranded", "overhead", "opaque", "unattributed")


def frame_and_texts(session: PageSession, *selectors: str) -> tuple[Any, list[list[str]]]:
    """Return a frame of the daemon, and the texts that the page shows for it."""
    frame = session.page.request.get(f"{session.page.url}api/v1/frame").json()
    show_frame(session, frame)
    texts = session.texts("html", *selectors)
    return frame, texts[1:]


def test_numbers_of_the_page_equal_those_of_the_api_in_the_same_frame(session: PageSession):
    frame, (used, legend, promise, programs, sizes) = frame_and_texts(
        session,
        ".total",
        ".legend dd",
        ".estimate > :is(span:first-child, b)",
        "tbody .of-program bdi",
        "tbody td.number:not(.of-gpu, .of-pid, .of-change)",
    )
    (device,) = frame["snapshot"]["devices"]
    share = {
        name: sum(line["used_bytes"] for line in frame["ledger"]["lines"] if line["share"] == name) for name in SHARES
    }
    ratio = round(100 * device["used_bytes"] / device["size_bytes"])
    assert used == [f"{size_text(device['used_bytes'])} of {size_text(device['size_bytes'])} used · {ratio}%"]
    (overcount,) = frame["ledger"]["overcounts"]
    assert legend == [
        size_text(device["reserved_bytes"]),
        size_text(overcount["overcount_bytes"]),
        size_text(device["free_bytes"]),
        *(size_text(share[name]) for name in reversed(SHARES)),
    ]
    cached = size_text(share["cached"])
    assert promise == (
        ["A flush now releases about", cached] if share["cached"] else ["A flush now releases", "nothing"]
    )
    processes = sorted(frame["processes"], key=lambda process: -process["used_bytes"])
    assert programs == [process["workload"] for process in processes]
    expected = [
        value
        for process in processes
        for value in (
            process["used_bytes"],
            process["cached_bytes"] + process["stranded_bytes"],
            *(process[f"{name}_bytes"] for name in SHARES[:5]),
        )
    ]
    assert sizes == [size_or_dash(value) for value in expected]
    titles = "all => all.map(cell => cell.title)"
    assert session.page.locator("tbody .of-used").evaluate_all(titles) == [
        f"{process['used_bytes']} B" for process in processes
    ]


def test_views_of_a_frame_agree(session: PageSession, demo: RunningDaemon):
    with serving_frame(demo) as fake:
        assert disagreements(consistent_frame(demo), session, fake) == []


@pytest.mark.parametrize("face", ["status", "top"])
def test_contradicting_view_is_found(demo: RunningDaemon, face: str):
    with serving_frame(demo) as fake:
        now = consistent_frame(demo)
        fake.show(now.frame)
        output = command(fake, face, *(["--once"] if face == "top" else []))
        assert list(of_command(now.frame, face, output)) == []
        now.frame["processes"][0]["used_bytes"] += GIB
        now.frame["snapshot"]["devices"][0]["used_bytes"] += GIB
        assert len(list(of_command(now.frame, face, output))) == 2


def test_bar_is_as_long_as_its_value(session: PageSession):
    frame, _ = frame_and_texts(session)
    script = """() => {
        const bar = document.querySelector('.edge');
        const height = node => node.getBoundingClientRect().height;
        return [height(bar), ...[...bar.children].map(height)];
    }"""
    (device,) = frame["snapshot"]["devices"]
    whole, *parts = session.page.evaluate(script)
    for name, width in zip(SHARES, parts, strict=False):
        held = sum(line["used_bytes"] for line in frame["ledger"]["lines"] if line["share"] == name)
        if held and width > 2:
            assert width / whole == pytest.approx(held / device["size_bytes"], abs=0.05), name
    assert parts[0] > parts[2]


def test_flush_shows_its_plan_asks_for_confirmation_and_shows_its_receipt(browser: Browser, demo: RunningDaemon):
    until(lambda: reclaimable(demo, "train-llm") > 2 * GIB)  # the program uses a part again while the plan is shown
    with open_page(browser, demo) as session:
        page = session.page
        page.get_by_role("button", name="Flush train-llm…").click(timeout=60_000)
        page.get_by_label("Token").fill("gpm_wrong")
        page.get_by_label("Token").press("Enter")
        session.shows("The token is invalid or has been revoked")
        sign_in(session, demo)
        dialog = page.locator("dialog#flush")
        dialog.get_by_text("should release").wait_for()
        assert dialog.get_by_text("planned").count() == 1
        assert [receipt["outcome"] for receipt in receipts_of(demo, "train-llm")] == []
        dialog.get_by_role("button", name="Flush now").click()
        dialog.get_by_text(" released.").wait_for(timeout=60_000)
        (receipt,) = receipts_of(demo, "train-llm")
        facts = dict(zip(*session.texts("#receipts dt", "#receipts dd"), strict=True))
        assert session.texts("#flush-words")[0] == [f"{size_text(receipt['released_bytes'])} released."]
        assert facts["released"] == size_text(receipt["released_bytes"])
        assert facts["counted by the driver"] == size_text(receipt["driver_released_bytes"])
        assert facts["planned"].startswith(f"{size_text(receipt['planned']['low'])} at ")
        assert facts["expected at start"] == size_text(receipt["expected"]["low"])
        assert (
            facts["held"]
            == f"{size_text(receipt['before']['held_bytes'])} → {size_text(receipt['after']['held_bytes'])}"
        )
        assert session.texts("#receipts .outcome")[0] == [receipt["outcome"]]
        dialog.get_by_role("button", name="Close").click()
        page.locator("#events .flush", has_text="train-llm").first.wait_for()  # without a reload
        token = (demo.directory / "token").read_text().strip()
        assert not [url for url in session.requested_urls if token in url]
        assert page.context.cookies() == []
        assert page.evaluate("[localStorage.length, sessionStorage.length]") == [0, 1]
        page.get_by_role("button", name="Sign out").click()
        assert page.evaluate("sessionStorage.length") == 0


def reclaimable(daemon: RunningDaemon, workload: str) -> int:
    reports = [report for report in daemon.get("agents") if report["workload"] == workload]
    return sum(pool["reclaimable"]["likely"] for report in reports for pool in report["pools"])


def receipts_of(daemon: RunningDaemon, workload: str) -> list[Any]:
    return [receipt for receipt in daemon.get("receipts") if receipt["workload"] == workload]


def test_refusal_is_shown_with_the_daemons_reason(browser: Browser, demo: RunningDaemon):
    """The plan is an example: the programs of a demo that has just started have nothing to release at times."""
    plan = FLUSH_RESPONSE.dump_python(
        replace(FLUSH_EXAMPLE, receipts=(replace(RECEIPT, outcome="planned"),)), mode="json"
    )

    def refuse(route: Route) -> None:
        if not route.request.url.endswith("/flushes"):
            route.continue_()
        elif json.loads(route.request.post_data or "{}")["dry_run"]:
            route.fulfill(json=plan)
        else:
            problem = {"title": "Too Many Requests", "status": 429, "detail": "all was flushed a moment ago"}
            route.fulfill(status=429, json=problem, content_type="application/problem+json")

    with open_page(browser, demo, guard=refuse) as session:
        session.page.get_by_role("button", name="Flush all…").click()
        sign_in(session, demo)
        session.page.get_by_role("button", name="Flush now").click()
        session.shows("all was flushed a moment ago")
        assert session.texts("#receipts")[0] == [""]


def test_flush_without_a_token_is_refused(session: PageSession, demo: RunningDaemon):
    before = demo.get("receipts")
    session.page.get_by_role("button", name="Flush all…").click()
    session.page.get_by_role("dialog", name="Flush all").get_by_role("form", name="Sign in").wait_for()
    assert session.page.locator("dialog[open]").count() == 1
    session.page.get_by_role("form", name="Sign in").get_by_role("button", name="Cancel").click()
    session.page.locator("dialog#flush").wait_for(state="hidden")
    assert demo.get("receipts") == before


def test_columns_keep_their_places_while_rows_open_and_get_values(session: PageSession):
    page = session.page
    frame = page.request.get(f"{page.url}api/v1/frame").json()
    frame["processes"][0]["opaque_bytes"] = MIB  # its column stays: a busy machine's demo has opaque memory at times
    show_frame(session, frame)
    page.unroute(LIVE)
    page.wait_for_function(f"() => document.documentElement.dataset.seq > {frame['snapshot']['seq']}")
    places = "() => [...document.querySelectorAll('#columns > *')].map(cell => cell.getBoundingClientRect().left)"
    for width in (390, 1440):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(1000)
        before = page.evaluate(places)
        page.get_by_role("button", name="notebook", exact=True).click()
        page.locator("tr.more .plot").wait_for()
        page.wait_for_timeout(1000)
        assert page.evaluate(places) == before
        page.get_by_role("button", name="notebook", exact=True).click()


def test_keyboard_sorts_filters_and_opens_rows(session: PageSession):
    page = session.page
    page.get_by_role("button", name="Program").focus()
    page.keyboard.press("Enter")
    assert session.texts("tbody .of-program bdi") == [sorted(PROGRAMS)]
    assert page.locator("th[aria-sort=ascending]").inner_text().strip("↑ ") == "Program"
    page.keyboard.press("j")
    assert page.evaluate("document.activeElement.textContent") == min(PROGRAMS)
    page.get_by_role("button", name="Program").focus()
    page.keyboard.press("Enter")
    assert session.texts("tbody .of-program bdi") == [sorted(PROGRAMS, reverse=True)]
    page.keyboard.press("j")
    assert page.evaluate("document.activeElement.textContent") == max(PROGRAMS)
    page.keyboard.press("/")
    page.keyboard.type("NOTE")
    assert session.texts("tbody .of-program bdi", "#shown") == [["notebook"], ["1 of 4"]]
    page.keyboard.press("Tab")
    page.get_by_role("button", name="notebook", exact=True).focus()
    page.keyboard.press("Enter")
    chart = page.locator("tbody .history svg")
    chart.wait_for()
    assert page.get_by_role("button", name="notebook", exact=True).get_attribute("aria-expanded") == "true"
    assert re.fullmatch(r"Used: .+ to .+ since .+, most recently .+\.", chart.get_attribute("aria-label") or "")
    lengths = page.evaluate("""['used', 'layer.live', 'layer.overhead', 'grid'].map(
        kind => document.querySelector(`tbody svg path.${kind}`).getAttribute('d').length)""")
    assert all(length > 20 for length in lengths)
    page.keyboard.press("Enter")
    chart.wait_for(state="hidden")


def test_keys_act_without_a_matching_process(session: PageSession):
    page = session.page
    for leave in ("Tab", "Escape"):
        page.keyboard.press("/")
        page.keyboard.type("qqq")
        session.shows("No process matches qqq.")
        page.keyboard.press(leave)
        page.keyboard.press("Escape")
        session.shows("chat-api")
    page.keyboard.press("j")
    page.keyboard.press("x")
    assert page.locator("#filter").input_value() == ""
    assert page.locator("#processes [aria-pressed=true]").count() == 1


def test_keys_say_why_they_can_not_act(browser: Browser, demo: RunningDaemon):
    def without_cache(frame: Any) -> None:
        for process in frame["processes"]:
            process["cached_bytes"] = 0

    with open_page(browser, demo, rewrite=without_cache) as session:
        page = session.page
        session.shows("chat-api")
        refusal = page.locator("#refusal")
        for keys, text in (
            ("f", "First choose a program with j or k."),
            ("jf", "has nothing to flush: its cache is empty."),
            ("F", "No program has anything to flush."),
            ("z", "t be suspended. For the reason, run: gpumond suspend --pid"),
            ("Z", "t suspended."),
            ("gf", "First choose a program with j or k."),
            ("jf", "First open the group with Enter, and choose a program in it."),
        ):
            for key in keys:
                page.keyboard.press(key)
            refusal.get_by_text(text).wait_for()
        page.keyboard.press("x")
        page.keyboard.press("s")
        assert refusal.inner_text() == ""
        page.keyboard.press("p")
        page.get_by_role("button", name="Resume").wait_for()
        page.keyboard.press("a")
        page.get_by_role("heading", name="Alert history").wait_for()


def test_workload_that_grew_since_an_hour_ago_is_first(session: PageSession, demo: RunningDaemon):
    frame, page = demo.get("frame"), session.page
    for process in frame["processes"]:
        process["used_bytes"] += 35 * GIB if process["workload"] == PROGRAMS[1] else 0
    show_frame(session, frame)
    page.get_by_label("Change in").select_option("1 h")
    page.get_by_label("Group by").select_option("workload")
    page.get_by_role("button", name="Change", exact=True).click()
    page.get_by_text(re.compile(r"^\+3\d\.\d GiB$")).first.wait_for()
    assert session.texts("tbody.group .of-program bdi")[0][0] == PROGRAMS[1]
    page.unroute(LIVE)


def test_each_kind_of_event_is_listed_and_in_one_choice(session: PageSession, demo: RunningDaemon):
    frame, page = demo.get("frame"), session.page
    at, about = (
        frame["snapshot"]["taken_at"],
        {"device_uuid": None, "pid": None, "start_ticks": None, "workload": "", "details": []},
    )
    kinds = get_args(EventKind)
    events = [about | {"id": n, "at": at - n, "kind": kind, "summary": kind} for n, kind in enumerate(kinds)]
    show_frame(session, frame, events)
    shown = []
    for choice in ("all", "alerts", "flushes", "programs"):
        page.locator("#events-of").select_option(choice)
        shown.append(sorted(session.texts("#events bdi")[0]))
    assert shown[0] == sorted(kinds) == sorted(itertools.chain(*shown[1:]))
    end = [("agent-disconnected", 0.0), ("process-ended", 1.0), ("verdict-ended", 1.2), ("alert-resolved", 4.0)]
    page.unroute(LIVE)
    about["pid"] = 10
    one = [about | {"id": n, "at": at + later, "kind": kind, "summary": kind} for n, (kind, later) in enumerate(end)]
    show_frame(session, frame, one)
    page.locator("#events-of").select_option("all")
    assert session.texts("#events bdi") == [["process-ended"]]
    page.unroute(LIVE)
    waits = [about | {"id": 9, "at": at, "kind": "wait", "summary": "waits", "details": [["occurred_at", at - 3]]}]
    show_frame(session, frame, waits)
    time = page.evaluate("at => new Date(1000 * at).toTimeString().slice(0, 8)", at - 3)
    assert session.texts("#events button") == [[time]]
    page.unroute(LIVE)


def test_repeated_error_is_listed_at_its_first_time_and_beside_every_alert(session: PageSession, demo: RunningDaemon):
    frame, page = demo.get("frame"), session.page
    at = frame["snapshot"]["taken_at"] - 60
    about = {"device_uuid": None, "pid": 10, "start_ticks": 1, "workload": "etl", "details": []}
    happened = [(0, "oom"), (3, "alert-fired"), (5, "flush"), (12, "oom")]
    events = [
        about | {"id": n, "at": at + later, "kind": kind, "summary": kind} for n, (later, kind) in enumerate(happened)
    ]
    show_frame(session, frame, events)
    last = page.evaluate("at => new Date(1000 * at).toTimeString().slice(0, 8)", at + 12)
    repeated = f"oom (2 times, the last at {last})"
    assert session.texts("#events bdi") == [["flush", "alert-fired", repeated]]
    page.locator("#events-of").select_option("alerts")
    assert session.texts("#events bdi") == [["alert-fired", repeated]]
    page.unroute(LIVE)


def test_events_are_those_of_the_chosen_device(browser: Browser, demo: RunningDaemon):
    frame = demo.get("frame")
    (device,) = frame["snapshot"]["devices"]
    frame["snapshot"]["devices"].append(device | {"uuid": "GPU-other", "index": 1, "used_bytes": 0})
    about = {"at": 1e9, "kind": "alert-fired", "pid": None, "start_ticks": None, "workload": "", "details": []}
    uuids = device["uuid"], "GPU-other", None
    events = [about | {"id": n, "device_uuid": uuid, "summary": f"of {uuid}"} for n, uuid in enumerate(uuids)]
    with open_page(browser, demo) as session:
        show_frame(session, frame, events)
        summaries = "#events li > bdi"
        assert session.texts(summaries) == [["of None", "of GPU-other", f"of {device['uuid']}"]]
        session.page.locator("#hero-of").select_option("GPU 1")
        until(lambda: session.texts(summaries) == [["of None", "of GPU-other"]])


def test_connected_programs_without_gpu_memory_are_named(session: PageSession, demo: RunningDaemon):
    frame = demo.get("frame")
    *_, report = frame["snapshot"]["reports"]
    waiting = {
        "id": "a",
        "pid": 9,
        "user": "dev",
        "device_uuid": frame["snapshot"]["devices"][0]["uuid"],
        "holders": [],
    }
    waiting |= {"need_bytes": GIB, "available_bytes": 0, "missing_bytes": GIB, "ahead": 0, "since": 1e9}
    frame["queue"] = [waiting | {"workload": "waits"}]
    frame["snapshot"]["reports"] += [
        report | {"pid": 7 + n, "workload": name} for n, name in enumerate(("lm", "lm", "waits", "cpu", ""))
    ]
    show_frame(session, frame)
    assert session.texts("#connected") == [["Connected, without GPU memory: cpu, lm"]]
    session.page.unroute(LIVE)


def test_group_has_the_worst_verdict_of_its_processes(session: PageSession, demo: RunningDaemon):
    frame, page = demo.get("frame"), session.page
    one, other = (next(each for each in frame["processes"] if each["workload"] == name) for name in PROGRAMS[:2])
    frame["alerts"], frame["verdicts"] = [], []
    for process, kind in ((one, "steady"), (other, "leak")):
        subject = {name: process[name] for name in ("device_uuid", "pid", "start_ticks")}
        about = {"kind": kind, "since": 1.0, "evidence": [], "summary": "", "fit": None, "time_to_full_seconds": None}
        frame["verdicts"].append(subject | about)
    show_frame(session, frame)
    page.get_by_label("Group by").select_option("device")
    assert session.texts("tbody.group .of-verdict.warn") == [["leak"]]
    page.get_by_label("Group by").select_option("workload")
    for _ in range(2):  # up, then down
        page.locator("#columns .of-verdict button").click()
    assert session.texts("tbody.group .of-program bdi")[0][0] == PROGRAMS[1]
    assert session.texts("tbody.group .of-verdict") == [["leak", "", "", ""]]
    page.unroute(LIVE)


def test_change_is_that_since_the_start_of_the_range(session: PageSession, demo: RunningDaemon):
    frame, page = demo.get("frame"), session.page
    first = frame["snapshot"]["taken_at"]
    frame["snapshot"]["elapsed_seconds"] = 7200
    known = [first - 3600.0]

    def past(route: Route) -> None:
        query = parse_qs(urlsplit(route.request.url).query)
        since, until = float(query["since"][0]), float(query.get("until", ["inf"])[0])
        points = [
            {"at": first + at, **dict.fromkeys(("low", "median", "high"), (1000 + at) * MIB)}
            for at in range(-900, 0, 10)
            if max(since, known[0]) <= first + at < until
        ]
        route.fulfill(json={"points": points})

    def shows(mib: int) -> None:
        page.locator("tbody .of-change", has_text=f"+{size_text(mib * MIB)}").first.wait_for()

    page.route("**/api/v1/history?**", past)
    for process in frame["processes"]:
        process.update(used_bytes=1000 * MIB, started_at=first - 7200)
    frame["processes"][0]["started_at"] = first - 600
    show_frame(session, frame)
    page.get_by_label("Change in").select_option("15 min")
    shows(900)
    shows(1000)
    new = page.locator("tbody .of-change", has_text=f"+{size_text(1000 * MIB)}")
    assert new.get_attribute("title") == "all that it uses: it started after the range began"
    frame["snapshot"]["taken_at"] += 60
    shows(840)
    known[0] = first - 300
    page.get_by_label("Change in").select_option("1 h")
    unknown = page.locator("tbody .of-change[title$='is unknown']")
    until(lambda: unknown.count() == len(frame["processes"]) - 1)
    assert set(unknown.all_text_contents()) == {""}
    frame["snapshot"]["elapsed_seconds"] = 301
    show_frame(session, frame)
    shows(300)
    assert page.locator("tbody .of-change[title$='the first known value']").count()
    now = frame["snapshot"]["taken_at"]
    frame["snapshot"]["elapsed_seconds"] = now - known[0] + 1
    for process in frame["processes"]:
        process.update(used_bytes=100 * MIB, started_at=known[0] - 0.8)
    frame["processes"][0]["started_at"] = now - 30
    show_frame(session, frame)
    page.get_by_label("Change in").select_option("15 min")
    page.get_by_text(re.compile("^change since .*, when the daemon started$")).wait_for()
    page.locator("tbody .of-change", has_text="-600.0 MiB").first.wait_for()
    assert page.locator("tbody .of-change", has_text="+100.0 MiB").count() == 1, "the one that started later"
    page.unroute(LIVE)


def test_browsers_back_returns_to_the_view_before(session: PageSession):
    page = session.page
    page.get_by_role("button", name="Alerts", exact=True).click()
    page.get_by_role("button", name="Receipts", exact=True).click()
    for view in ("Alerts", "Overview"):
        page.go_back()
        page.locator(f"#views [aria-current=page]:text-is('{view}')").wait_for()


def test_link_opens_what_is_shown(session: PageSession):
    page = session.page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_label("Group by").select_option("workload")
    page.get_by_role("button", name="train-llm").click()
    page.get_by_role("button", name="train-llm").nth(1).click()
    page.get_by_role("button", name="Copy link").click()
    session.shows("Link copied")
    link = page.evaluate("navigator.clipboard.readText()")
    assert link == session.address()
    other = PageSession(page.context, link)
    other.page.locator(".device .plot").wait_for()
    other.page.locator("tbody.process .plot").wait_for()
    assert sorted(other.texts("tbody.group .of-program bdi")[0]) == sorted(PROGRAMS)
    page.evaluate("void (navigator.clipboard.writeText = async () => { throw new Error() })")
    place = "() => document.querySelector('#content').getBoundingClientRect().top"
    before = page.evaluate(place)
    page.get_by_role("button", name="Copy link").click()
    session.shows("Your browser doesn't allow copying: the address bar has the link")
    assert page.evaluate(place) == before, "the page does not move"


def test_processes_are_downloaded_as_they_are_shown(session: PageSession):
    page = session.page
    page.get_by_role("button", name="Program", exact=True).click()
    page.get_by_label("Filter").fill("chat-api")
    session.shows("1 of 4")
    with page.expect_download() as saved:
        page.get_by_role("group", name="Download processes").get_by_role("button", name="CSV").click()
    table = list(csv.DictReader(saved.value.path().read_text().splitlines()))
    assert [row["program"] for row in table] == ["chat-api"]
    assert all(int(row["used_bytes"]) > 0 for row in table)
    with page.expect_download() as saved:
        page.get_by_role("button", name="JSON").click()
    document = json.loads(saved.value.path().read_text())
    assert [process["program"] for process in document["processes"]] == ["chat-api"]
    assert (document["filter"], document["order"]) == ("chat-api", {"id": "program", "up": True})


SAVED = """(id) => new Promise((resolve) => {
    URL.createObjectURL = (blob) => (blob.text().then(resolve), "data:,");
    document.getElementById(id).click();
})"""


@pytest.mark.parametrize("kind", ["csv", "json"])
def test_each_downloaded_row_is_of_one_frame(session: PageSession, kind: str):
    page = session.page
    page.locator("#processes tbody").first.wait_for()
    page.evaluate("void (requestAnimationFrame = () => 0)")  # frames arrive, and aren't drawn
    found = set()

    def differs() -> bool:
        text = page.evaluate(SAVED, kind)
        rows = csv.DictReader(text.splitlines()) if kind == "csv" else json.loads(text)["processes"]
        sizes = [[int(row[f"{name}_bytes"]) for name in ("waste", "cached", "stranded")] for row in rows]
        assert [waste for waste, *_ in sizes] == [cached + stranded for _, cached, stranded in sizes]
        found.add(str(sizes))
        return len(found) > 2

    until(differs)


def test_filter_searches_fields_and_says_so(session: PageSession, demo: RunningDaemon):
    page, filter_ = session.page, session.page.get_by_label("Filter")
    (user,) = {each["user"] for each in demo.get("processes")}
    for words, programs in (
        (f"user:{user} train", ["train-llm"]),
        ("train etl", []),
        (f"program:{user}", []),
        ("-train -etl gpu:0 -program:chat", ["notebook"]),
    ):
        filter_.fill(words)
        count = f"{len(programs)} of 4" if programs else f"No process matches {words}."
        page.locator("#shown", has_text=count).wait_for()
        assert session.texts("tbody.process .of-program bdi")[0] == programs
    assert "user:root" in (filter_.get_attribute("title") or "")
    filter_.fill("")
    page.get_by_role("button", name="Help").click()
    page.get_by_text(
        "Filter processes, or the open view, where Enter opens the first row. Rows that contain all words."
    ).wait_for()


def test_help_explains_every_share(session: PageSession):
    session.page.locator("#caption").wait_for()
    session.page.keyboard.press("?")
    dialog = session.page.get_by_role("dialog", name="Help")
    dialog.wait_for()
    assert dialog.get_by_text("A minute of diagnosis takes 3 s.").is_visible()
    terms, sentences = session.texts("#help-shares dt", "#help-shares dd")
    assert terms[: len(SHARES)] == list(SHARES)
    assert all(sentence.endswith(".") and sentence.count(".") == 1 for sentence in sentences)
    dialog.get_by_role("button", name="Close").click()
    dialog.wait_for(state="hidden")


@pytest.mark.parametrize("by", ["", "workload"])
def test_rows_keep_their_place_under_the_pointer(browser: Browser, demo: RunningDaemon, by: str):
    frames = 0

    def reverse_order(frame: Any) -> None:
        """Reverse the order of processes in every frame."""
        nonlocal frames
        frames += 1
        for place, process in enumerate(sorted(frame["processes"], key=lambda process: process["pid"])):
            process["used_bytes"] = GIB * (place if frames % 2 else 9 - place)

    with open_page(browser, demo, rewrite=reverse_order) as session:
        rows = session.page.locator("tbody .of-program")
        rows.first.wait_for()

        session.page.get_by_label("Group by").select_option(by)

        def orders(seconds: int, most: int) -> set[tuple[str, ...]]:
            """Return the orders of the rows during these seconds, or earlier if there are ``most``."""
            found: set[tuple[str, ...]] = set()
            for _ in range(10 * seconds):
                found.add(tuple(session.texts("tbody .of-program bdi")[0]))
                if len(found) == most:
                    break
                session.page.wait_for_timeout(100)
            return found

        # A notice or a verdict that appears above the table would move the rows away from the pointer.
        above = "#notices, #problems, #hero"
        session.page.evaluate(
            "above => document.querySelectorAll(above).forEach(each => (each.style.display = 'none'))", above
        )
        rows.nth(1).hover()
        session.page.locator("tbody:hover").wait_for()
        assert len(orders(4, most=2)) == 1
        session.page.locator("#shown", has_text="order kept while you are in the table").wait_for()
        session.page.mouse.move(0, 0)
        assert len(orders(30, most=2)) == 2
        rows.nth(1).hover()
        session.page.locator("#shown", has_text="order kept while you are in the table").wait_for(timeout=60_000)
        session.page.evaluate("performance.now = () => Performance.prototype.now.call(performance) + 20_000")
        assert len(orders(30, most=2)) == 2, "the pointer rests"


def test_table_keeps_its_place_while_the_pointer_moves_over_it(session: PageSession, demo: RunningDaemon):
    frame, page = demo.get("frame"), session.page
    alert = {"rule": "full", "phase": "firing", "labels": [], "annotations": [], "active_at": 1.0, "silenced_by": []}
    frame["alerts"] = frame["verdicts"] = []
    page.set_viewport_size({"width": 1000, "height": 900})  # in a wide one, the place of three problems is reserved
    show_frame(session, frame)
    table = page.locator(".rows")
    table.hover()
    before = table.bounding_box()
    frame["alerts"] = [alert]
    problems = page.get_by_text(re.compile(r"^1 problem"))
    while not problems.count():
        page.mouse.move(300, 700 + page.evaluate("Math.random()"))
        page.wait_for_timeout(200)
    assert table.bounding_box() == pytest.approx(before, abs=0.1)  # the layout counts 64ths of a pixel
    page.mouse.move(0, 0)
    until(lambda: (table.bounding_box() or {}) != before)
    page.unroute(LIVE)


def test_hidden_tab_sends_no_requests(session: PageSession):
    turn = """hidden => {
        Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });
        document.dispatchEvent(new Event('visibilitychange'));
    }"""
    session.page.evaluate(turn, True)
    session.page.wait_for_timeout(300)
    session.requested_urls.clear()
    session.page.wait_for_timeout(2500)
    assert session.requested_urls == []
    session.page.evaluate(turn, False)
    session.page.wait_for_timeout(500)
    assert [url for url in session.requested_urls if url.endswith("/live")]


def test_page_requests_a_token_if_reading_requires_one(browser: Browser, demo: RunningDaemon):
    """The guard acts like a daemon that other machines can reach."""

    def guard(route: Route) -> None:
        if route.request.headers.get("authorization", "").startswith("Bearer gpm_"):
            route.continue_()
        else:
            problem = {"title": "Unauthorized", "status": 401, "detail": "reading requires a token"}
            route.fulfill(status=401, json=problem, content_type="application/problem+json")

    with open_page(browser, demo, guard=guard) as session:
        session.shows("Sign in to see this page")
        session.shows("reading requires a token")
        assert not session.page.locator("#content").is_visible()
        session.page.get_by_role("button", name="Sign in").click()
        sign_in(session, demo)
        session.page.locator("tbody .of-program").first.wait_for()
        session.page.locator("#events .agent-connected").first.wait_for()


def test_page_signs_in_with_the_code_in_its_address(browser: Browser, demo: RunningDaemon):
    token = (demo.directory / "token").read_text().strip()
    _, answer, _ = demo.request("/api/v1/sessions/code", {}, Authorization=f"Bearer {token}")
    address = f"{demo.url}/#code={json.loads(answer)['code']}"
    with open_page(browser, demo) as session:
        session.page.get_by_role("button", name="Sign in").click()
        session.shows(f"GPUMOND_RUNTIME_DIR={demo.directory} gpumond open --url {demo.url}")
        signed_in = PageSession(session.page.context, address)
        signed_in.page.get_by_role("button", name="Sign out").wait_for()
        assert signed_in.address() == f"{demo.url}/"
        assert signed_in.complaints == []
        again = PageSession(session.page.context, address)
        again.shows("was used before")


def test_quota_and_missing_reserve_of_a_process_are_shown(session: PageSession):
    frame = session.page.request.get(f"{session.page.url}api/v1/frame").json()
    process = next(each for each in frame["processes"] if each["workload"] == "train-llm")
    quota = {f"{kind}_{part}": None for kind in LIMIT_KEYS for part in ("bytes", "quota")}
    quota |= {"limit_bytes": 8 * GIB, "limit_quota": "research", "reserve_bytes": 6 * GIB, "reserve_quota": "floor"}
    process.update(quota=quota, limit_bytes=8 * GIB, reserve_shortage_bytes=GIB)
    show_frame(session, frame)
    row = session.page.locator("tbody", has_text="train-llm").first
    row.get_by_role("button", name="train-llm", exact=True).click()
    row.get_by_text("limit 8.0 GiB (research), reserve 6.0 GiB (floor)").wait_for()
    row.get_by_text("1.0 GiB taken by other programs").wait_for()
    assert row.get_by_text("not in effect").count() == 0
    process["limit_bytes"] = None
    show_frame(session, frame)
    row.get_by_text("(floor), limit not in effect: the program doesn't allow limits").wait_for()
    quotas = [{"name": "research", "origin": "configuration", "quota": {"limit_bytes": 8 * GIB}}]
    session.page.route("**/api/v1/quotas", lambda route: route.fulfill(json=quotas))
    session.page.get_by_role("button", name="Quotas").click()
    session.page.get_by_text(
        "; limit not in effect: the program doesn't allow limits, or hasn't applied it)"
    ).wait_for()
    process |= {"limit_bytes": 8 * GIB, "used_bytes": 9 * GIB, "overhead_bytes": GIB}
    show_frame(session, frame)
    session.page.get_by_text("train-llm (9.0 GiB; the limit doesn't count 1.0 GiB of overhead)").wait_for()
    quota.update(soft_limit_bytes=5 * GIB, soft_limit_quota="research", limit_quota=None)
    show_frame(session, frame)
    exceeded = session.page.locator("td.warn")
    exceeded.get_by_text("train-llm (9.0 GiB; 4.0 GiB more than the soft limit)").wait_for()
    session.page.get_by_role("button", name="Overview").click()
    session.page.unroute("**/api/v1/quotas")
    session.page.unroute(LIVE)


def test_link_restores_order_and_filter(session: PageSession):
    page = session.page
    page.get_by_role("button", name="Program", exact=True).click()
    page.get_by_label("Filter").fill("chat-api")
    assert session.address().endswith("#sort=program%2Cup&filter=chat-api")
    other = PageSession(page.context, session.address())
    other.page.locator("#shown", has_text="1 of 4").wait_for()
    assert other.page.get_by_label("Filter").input_value() == "chat-api"
    assert other.page.locator("#columns [aria-sort=ascending]").inner_text() == "Program"
    page.get_by_label("Filter").fill("")
    assert session.address().endswith("#sort=program%2Cup")
