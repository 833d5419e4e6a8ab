"""Cards of problems: their place and size, and what they lead to. The headline, and the chart beside it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

from gpumond.facts.verdicts import VERDICT_REMEDIES
from tests.helpers.agents import GIB
from tests.helpers.browser import PHONE, PageSession, needs_chromium, open_page, signed_in
from tests.helpers.running import RunningDaemon, until
from tests.integration.page_tasks import cached

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [needs_chromium, pytest.mark.timeout(180)]
BOXES = """() => [...document.querySelectorAll('.card, .card .acts > :not([hidden]), #devices-section, #processes')]
    .filter(node => node.checkVisibility())
    .map(node => [node, node.getBoundingClientRect()])
    .map(([node, box]) => [node.textContent.slice(0, 8), box.x, box.y, box.height])"""
WHOLE = "node => node.scrollHeight <= node.clientHeight + 1"


SUMMARY = "document.querySelector('tbody .history .summary')?.textContent ?? ''"


def process_of(frame: Any, workload: str) -> Any:
    return next(each for each in frame["processes"] if each["workload"] == workload)


def leak_of(frame: Any, workload: str) -> dict[str, Any]:
    process = process_of(frame, workload)
    subject = {name: process[name] for name in ("device_uuid", "pid", "start_ticks")}
    taken_at = frame["snapshot"]["taken_at"]
    evidence = [["slope_bytes_per_second", 1e6], ["window_seconds", 60.0]]
    about = {"kind": "leak", "since": taken_at - 60, "evidence": evidence, "summary": "", "form": "linear", "fit": None}
    return subject | about | {"time_to_full_seconds": 600.0}


def alert_of(verdict: dict[str, Any], workload: str, phase: str) -> dict[str, Any]:
    labels = [["alertname", "leak"], ["severity", "warning"], ["uuid", verdict["device_uuid"]], ["workload", workload]]
    times = {"active_at": verdict["since"], "fired_at": verdict["since"] if phase == "firing" else None}
    subject = {name: verdict[name] for name in ("pid", "start_ticks")}
    about = {"rule": "leak", "phase": phase, "labels": labels, "annotations": [["summary", "leaks"]], "value": 1.0}
    return subject | about | times | {"silenced_by": []}


def test_card_keeps_place_and_size_while_it_changes(browser: Browser, demo: RunningDaemon):
    number = count()

    def changing(frame: Any) -> None:
        """A verdict, then its alert, whose program has nothing to flush in every second frame."""
        at = next(number)
        process_of(frame, "notebook")["cached_bytes"] = GIB * (at % 2)
        frame["ledger"]["overcounts"][0]["overcount_bytes"] = GIB * (at % 2)
        verdict = leak_of(frame, "notebook")
        frame["verdicts"] = [verdict]
        frame["alerts"] = [alert_of(verdict, "notebook", "firing" if at > 2 else "pending")] if at else []

    with open_page(browser, demo, rewrite=changing) as session:
        page = session.page
        page.locator(".card", has_text="warning for").wait_for()
        page.locator(".card").evaluate("node => { node.marked = true; }")
        boxes = [(page.evaluate(BOXES), page.wait_for_timeout(700))[0] for _ in range(6)]
        moved = [pair for each in boxes for pair in zip(boxes[0], each, strict=True) if pair[0] != pair[1]]
        assert moved == [], (moved, page.locator("#hero").inner_text())
        assert page.locator(".card").evaluate("node => node.marked")
        flush = page.get_by_role("button", name="Flush leak notebook")
        until(flush.is_enabled)
        until(flush.is_disabled)
        reason = '[title="notebook has nothing to flush: its cache is empty."]'
        page.locator(f".card {reason}").wait_for()
        page.locator(f"#processes {reason}").wait_for()


def test_first_problem_moves_nothing_under_the_pointer_and_evidence_nothing_above_it(
    browser: Browser, demo: RunningDaemon
):
    leaking: list[bool] = []

    def changing(frame: Any) -> None:
        frame["verdicts"], frame["alerts"] = [leak_of(frame, "notebook") for _ in leaking], []

    with open_page(browser, demo, {"width": 1440, "height": 900}, rewrite=changing) as session:
        page = session.page
        top = "selector => document.querySelector(selector).getBoundingClientRect().top"
        session.shows("None found on 1 GPU: ")
        page.locator("#hero .plot path.used").wait_for(state="attached")
        before = page.evaluate(top, "#processes")
        leaking.append(True)
        pointer = count(400)

        def cards_while_the_pointer_moves() -> int:
            page.mouse.move(next(pointer) % 900, before + 60)
            return page.locator(".card").count()

        until(cards_while_the_pointer_moves)
        assert page.evaluate(top, "#processes") == before
        page.mouse.move(400, 200)
        until(lambda: page.evaluate(top, "#processes") > before)
        place = page.evaluate(top, ".card")
        page.get_by_role("button", name="Evidence leak").click()
        page.locator(".fit[open] .next").wait_for()
        assert page.evaluate(top, ".card") == place


def test_alert_continues_the_card_of_its_verdict(browser: Browser, demo: RunningDaemon):
    alerting: list[bool] = []

    def leaking(frame: Any) -> None:
        verdict = leak_of(frame, "notebook")
        frame["verdicts"], frame["alerts"] = [verdict], [alert_of(verdict, "notebook", "firing") for _ in alerting[:1]]

    with open_page(browser, demo, rewrite=leaking) as session:
        page = session.page
        page.get_by_role("button", name="Evidence leak").click()
        next_step = page.locator(".card .fit[open] .next")
        next_step.wait_for()
        assert "Next: find out what retains the memory: Why" in next_step.inner_text()
        alerting.append(True)
        page.locator(".card", has_text="warning for").wait_for()
        assert next_step.is_visible()


@pytest.mark.parametrize(
    ("viewport", "first"), [({"width": 1440, "height": 900}, 3), (PHONE, 2)], ids=["wide", "phone"]
)
def test_further_problems_are_folded(browser: Browser, demo: RunningDaemon, viewport: Any, first: int):
    def many(frame: Any) -> None:
        verdict = leak_of(frame, "notebook")
        found = [alert_of(verdict, "notebook", "firing") | {"rule": f"rule-{number}"} for number in range(8)]
        frame["verdicts"], frame["alerts"] = [], found

    with open_page(browser, demo, viewport, rewrite=many) as session:
        page = session.page
        page.get_by_role("button", name="Show all 8").wait_for()
        assert page.locator(".card:visible").count() == first
        page.get_by_role("button", name="Show all 8").click()
        assert page.locator(".card:visible").count() == 8
        assert page.locator("#alerts").evaluate("node => node.scrollHeight - node.clientHeight") <= 1
        page.get_by_role("button", name="Show fewer").click()
        assert page.locator(".card:visible").count() == first
        assert page.title().startswith("(8) gpumond")


@pytest.mark.parametrize("size", [(390, 844), (1024, 768), (1440, 900)], ids=["phone", "tablet", "wide"])
def test_problems_take_a_part_of_the_window_and_never_scroll(
    browser: Browser, demo: RunningDaemon, size: tuple[int, int]
):
    def three(frame: Any) -> None:
        verdict = leak_of(frame, "notebook") | {"retained_by": "/app/a/long/path/to/the/cache.py:120 (CACHE.append)"}
        found = [alert_of(verdict, "notebook", "firing") | {"rule": rule} for rule in ("leak", "rule-1", "rule-2")]
        frame["verdicts"], frame["alerts"] = [verdict], found

    width, height = size
    with open_page(browser, demo, {"width": width, "height": height}, rewrite=three) as session:
        page = session.page
        page.locator(".card").nth(2).wait_for(state="attached")
        cards = page.locator("#alerts")
        assert cards.evaluate("node => node.offsetHeight") <= height * (0.45 if width == 390 else 0.25)
        assert cards.evaluate(WHOLE)
        page.get_by_role("button", name="Evidence leak").evaluate("button => button.click()")
        page.locator(".fit[open] .next").scroll_into_view_if_needed()
        assert cards.evaluate(WHOLE)


def test_cards_have_a_curve_with_its_ceiling_and_stay_beside_the_open_evidence(browser: Browser, demo: RunningDaemon):
    def three(frame: Any) -> None:
        process = process_of(frame, "notebook")
        process["limit_bytes"] = 2 * process["used_bytes"]
        verdict = leak_of(frame, "notebook")
        rules = ("quota-exceeded", "leak", "allocation-retries")
        found = [alert_of(verdict, "notebook", "firing") | {"rule": rule} for rule in rules]
        frame["verdicts"], frame["alerts"] = [verdict], found

    with open_page(browser, demo, {"width": 1440, "height": 900}, rewrite=three) as session:
        page = session.page
        for number in range(3):
            card = page.locator(".card").nth(number)
            card.locator(".trend path.used").wait_for(state="attached")
            (full,) = card.locator(".trend path.full").evaluate_all("all => all.map(path => path.getAttribute('d'))")
            assert full == "M0 0.5H100", "the limit is at the top"
            assert card.locator("time").inner_text() == "warning for 1 min"
        page.get_by_role("button", name="Evidence leak").click()
        page.locator(".fit[open] .next").wait_for()
        boxes = page.locator(".card").evaluate_all(
            "all => all.map(card => card.getBoundingClientRect()).map(({ x, y, width }) => [x, y, width])"
        )
        (opened,) = [box for box in boxes if box[2] > 600]
        first, second = (box for box in boxes if box != opened)
        assert first[1] == opened[1] < second[1]
        assert first[0] == second[0], "in the remaining column"


def test_headline_legend_and_chart_state_the_same_bytes(session: PageSession):
    page = session.page
    page.locator("#hero .plot path.used").wait_for(state="attached")
    for _ in range(8):
        (total,), (summary,), rows, legend, (reclaimable,) = session.texts(
            "#hero .total", "#hero .summary", "tbody.process .of-used", "#hero .legend > div", "#hero .estimate b"
        )
        used = total.split(" of ")[0]
        assert f", most recently {used}." in summary
        assert reclaimable in (
            next(each for each in legend if each.startswith("cached")).removeprefix("cached"),
            "nothing",
        )
        assert len(rows) == 4
        page.wait_for_timeout(350)


def test_why_ends_with_what_to_do(browser: Browser, demo: RunningDaemon):
    until(lambda: cached(demo, "train-llm") > GIB / 2, 60)
    with signed_in(browser, demo) as session:
        page = session.page
        session.shows_content()
        page.get_by_role("rowheader", name="train-llm").get_by_role("button").first.click()
        why = page.get_by_role("button", name="Why… Memory of train-llm")
        steps = page.get_by_role("dialog", name="Memory of train-llm").locator("article").last
        why.click()
        steps.get_by_text("Next steps").wait_for()
        while steps.get_by_text("A flush would release nothing").is_visible():  # the program has just used its cache
            page.keyboard.press("Escape")
            why.click()
            steps.get_by_text("Next steps").wait_for()
        steps.get_by_text("gpumond flush train-llm").wait_for()
        steps.get_by_role("button", name="Flush…").click()
        page.get_by_role("dialog", name="Flush train-llm").wait_for()
        assert not page.get_by_role("dialog", name="Memory of train-llm").is_visible()


def test_why_names_the_remedy_of_a_problem(browser: Browser, demo: RunningDaemon):
    def leaking(frame: Any) -> None:
        frame["verdicts"], frame["alerts"] = [leak_of(frame, "notebook")], []

    with open_page(browser, demo, rewrite=leaking) as session:
        page = session.page
        page.get_by_role("button", name="Why leak notebook").click()
        page.get_by_role("form", name="Sign in").wait_for()
        last = VERDICT_REMEDIES["leak"].split("; ")[-1]
        assert last[0].upper() + last[1:] in page.locator("#why article").last.inner_text()


def test_button_suspends_an_idle_program_and_resumes_it(browser: Browser, serve: Callable[..., RunningDaemon]):
    demo = serve("--devices", "2", command="demo")
    until(lambda: demo.request("/-/ready")[0] == 200)
    until(lambda: any((p["idle_seconds"] or 0) > 1 for p in demo.get("processes") if p["workload"] == "embeddings"))
    with signed_in(browser, demo) as session:
        page = session.page
        page.keyboard.press("Control+k")
        page.keyboard.type("suspend embeddings")
        page.keyboard.press("Enter")
        dialog = page.get_by_role("dialog", name=re.compile("Suspend embeddings"))
        dialog.get_by_text("This should move 8.9 GiB to the host. The program can").wait_for()
        dialog.get_by_role("button", name="Suspend now").click()
        dialog = page.get_by_role("dialog", name=re.compile("Suspension of embeddings"))
        dialog.locator(".outcome", has_text="suspended").wait_for()
        dialog.get_by_role("button", name="Close").click()
        until(lambda: [each["workload"] for each in demo.get("suspensions")] == ["embeddings"])
        session.shows("suspended for")
        page.wait_for_function(f"() => /^Used: 0 B /.test({SUMMARY})")
        page.reload()
        page.wait_for_function(f"() => /^Used: 0 B .*, most recently 0 B.$/.test({SUMMARY})")
        assert page.locator("tbody .unknown:not(.unstarted)").count() == 0, "nothing is unknown"
        granted = until(lambda: [each["pid"] for each in demo.get("processes") if each["workload"] == "pretrain"])
        page.locator(".suspension").get_by_role("button", name="Resume").click()
        session.shows("Resuming as soon as its memory is free")
        page.locator("tbody.process .of-verdict", has_text="waiting to resume").wait_for()
        page.keyboard.press("Control+k")
        page.keyboard.type("cancel resuming embeddings")
        page.keyboard.press("Enter")
        session.shows("canceled the request to resume")
        until(lambda: [each["state"] for each in demo.get("suspensions")] == ["suspended"])
        page.locator(".suspension").get_by_role("button", name="Resume").click()
        session.shows("Resuming as soon as its memory is free")
        os.kill(granted[0], signal.SIGKILL)  # it would hold the memory for 100 s; its next request is behind this one
        until(lambda: not demo.get("suspensions"), 60)


def finds(page: Page, words: str, first: str) -> None:
    """Wait until the palette's first command for these words begins with ``first``."""
    page.keyboard.press("Control+k")
    page.keyboard.type(words)
    page.locator("#palette-list li:first-child", has_text=re.compile(f"^{re.escape(first)}")).wait_for()
    page.keyboard.press("Escape")


def test_card_of_an_idle_program_suspends_it_and_the_first_screen_says_so(browser: Browser, demo: RunningDaemon):
    asked: list[bool] = []

    def idle(frame: Any) -> None:
        verdict = leak_of(frame, "notebook") | {"kind": "idle-holder"}
        frame["alerts"], frame["verdicts"] = [], [verdict]
        process_of(frame, "notebook")["cached_bytes"] = 0
        subject = {name: verdict[name] for name in ("pid", "start_ticks")}
        for process in frame["processes"]:
            process["suspendable"] = process["workload"] == "notebook"
        memory = [{"device_uuid": verdict["device_uuid"], "device_index": 0, "used_bytes": 9 * GIB}]
        about = {"id": "1", "uid": 0, "workload": "notebook", "state": "suspended", "since": verdict["since"]}
        program = subject | about | {"memory": memory, "host_bytes": None, "grants": [], "reason": ""}
        frame["snapshot"]["suspended_programs"] = [program] if asked else []

    with open_page(browser, demo, rewrite=idle) as session:
        page = session.page
        card = page.locator(".card")
        flush = card.get_by_role("button", name="Flush")
        until(flush.is_disabled)
        assert "has nothing to flush" in (flush.get_attribute("title") or "")
        page.locator("tbody.process", has_text="notebook").get_by_text(re.compile(r"^[\d.]+ [MG]iB idle$")).wait_for()
        finds(page, "idle", "Idle memory (waste): ")
        card.get_by_role("button", name="Suspend").click()
        page.get_by_role("form", name="Sign in").get_by_role("button", name="Cancel").click()
        page.get_by_role("button", name="train-llm", exact=True).click()
        session.shows("To suspend train-llm, start it with gpumond run --suspendable.")
        asked.append(True)
        page.locator(
            "#hero-queue li", has_text=re.compile("notebook .*suspended for .*needs 9.0 GiB to resume")
        ).wait_for()
        until(card.get_by_role("button", name="Suspend").is_disabled)
        finds(page, "resume", "Resume notebook (pid ")
        legend = page.locator(".legend div", has_text="of which suspended")
        legend.wait_for()
        signs = page.locator(":is(.legend, .edge, #hero-queue) .suspended").evaluate_all(
            "all => all.map(sign => getComputedStyle(sign).backgroundImage)"
        )
        assert (len(signs), len(set(signs))) == (3, 1)


def test_palette_suspends_compares_and_ends_silences(browser: Browser, demo: RunningDaemon):
    def suspendable(frame: Any) -> None:
        for process in frame["processes"]:
            process["suspendable"] = process["workload"] == "notebook"
        now = frame["snapshot"]["taken_at"]
        matchers = [{"name": "rule", "operator": "=", "value": "leak"}]
        silence = {"id": "1", "matchers": matchers, "author": "token/session:66da1d2d@uid:0", "reason": "planned"}
        frame["silences"] = [silence | {"starts_at": now - 1, "ends_at": now + 60}]

    with open_page(browser, demo, rewrite=suspendable) as session:
        page = session.page
        session.shows_content()
        assert page.locator("#silences bdi").text_content() == "root (token, browser): planned"
        for words in ("suspend note", "end silence leak"):
            page.keyboard.press("Control+k")
            page.keyboard.type(words)
            page.keyboard.press("Enter")
            dialog = page.get_by_role("form", name="Sign in")
            dialog.get_by_role("button", name="Cancel").click()
            dialog.wait_for(state="hidden")  # the palette opens beside no other dialog
        assert page.locator("tbody.process .suspension").is_visible(), "the result is shown in the details"
        page.keyboard.press("Control+k")
        page.keyboard.type("compare notebook")
        page.keyboard.press("Enter")
        page.get_by_role("button", name=re.compile("Compare 1")).wait_for()


def test_ended_problem_is_counted_apart(browser: Browser, demo: RunningDaemon):
    def over(frame: Any) -> None:
        alert = alert_of(leak_of(frame, "notebook"), "notebook", "firing")
        alert["annotations"] = [["summary", "ended at 00:00:00 UTC; the alert was: leaks"]]
        frame["verdicts"], frame["alerts"] = [], [alert]

    with open_page(browser, demo, rewrite=over) as session:
        session.shows("0 problems · 1 ended")


def test_problems_are_those_of_the_chosen_device(browser: Browser, serve: Callable[..., RunningDaemon]):
    demo = serve("--devices", "2", command="demo")
    until(lambda: {"notebook", "finetune"} <= {each["workload"] for each in demo.get("agents") if each["pools"]})

    def leaking(frame: Any) -> None:
        frame["verdicts"], frame["alerts"] = [leak_of(frame, name) for name in ("notebook", "finetune")], []

    with open_page(browser, demo, {"width": 1440, "height": 900}, rewrite=leaking) as session:
        page = session.page
        session.shows("2 problems")
        page.get_by_label("Show").first.select_option("GPU 0")
        session.shows("1 problem · 1 on other GPUs")
        assert session.texts(".card:not([hidden]) .what bdi", "#hero-title span") == [["notebook on GPU 0"], ["GPU 0"]]
        assert set(session.texts("tbody.process .of-gpu")[0]) == {"0"}
        page.get_by_label("Filter").fill("finetune")
        session.shows("None on GPU 0, 1 on other GPUs.")
        page.get_by_role("button", name="Show all GPUs").click()
        session.shows("1 of ")
        assert session.texts("tbody.process .of-program bdi", "#hero-title span") == [["finetune"], ["2 GPUs"]]
        page.get_by_label("Show").first.select_option("GPU 0")
        page.get_by_role("heading", name="Processes").click()
        page.keyboard.press("Escape")
        session.shows("2 problems")
        assert session.texts("#hero-title span")[0] == ["2 GPUs"]
        assert {"0", "1"} == set(session.texts("tbody.process .of-gpu")[0])


def test_problems_that_come_and_go_move_no_table(browser: Browser, demo: RunningDaemon):
    counts = count()

    def changing(frame: Any) -> None:
        found = next(counts) % 4
        verdict = leak_of(frame, "notebook")
        alerts = [alert_of(verdict, "notebook", "firing") | {"rule": f"rule-{number}"} for number in range(found)]
        frame["verdicts"], frame["alerts"] = [], alerts

    with open_page(browser, demo, {"width": 1440, "height": 900}, rewrite=changing) as session:
        page = session.page
        page.locator("#hero .plot path.used").wait_for(state="attached")
        tops = set()
        for cards in (1, 2, 3, 0):
            page.wait_for_function(f"() => document.querySelectorAll('.card').length === {cards}")
            tops.add(page.evaluate("document.querySelector('#processes').getBoundingClientRect().top"))
        assert len(tops) == 1


def test_card_of_a_problem_that_is_over_is_quiet(browser: Browser, demo: RunningDaemon):
    def over(frame: Any) -> None:
        process = process_of(frame, "etl")
        process["stranded_bytes"] = 0
        alert = alert_of(leak_of(frame, "etl"), "etl", "firing") | {"rule": "fragmentation", "value": 0.57}
        ended = alert | {"rule": "leak", "annotations": [["summary", "ended at 07:32:05 UTC; the alert was: leaks"]]}
        frame["verdicts"], frame["alerts"] = [], [alert, ended]

    with open_page(browser, demo, rewrite=over) as session:
        card = session.page.locator(".card.quiet", has_text="nothing is stranded now")
        card.wait_for()
        session.page.get_by_role("button", name="Rules").click()
        session.page.get_by_role("row", name="leak process with the verdict leak").get_by_text("1 ended").wait_for()
