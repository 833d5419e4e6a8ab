"""Eight tasks that a user completes with what the page shows, each in at most six interactions."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import TypeAdapter

from gpumond.facts.frame import Verdict
from gpumond.serve.examples import VERDICT
from tests.helpers.agents import GIB
from tests.helpers.browser import (
    LIVE,
    PROGRAMS,
    PageSession,
    needs_chromium,
    open_page,
    put_rule,
    show_frame,
    signed_in,
)
from tests.helpers.running import RunningDaemon, until
from tests.integration.large_machine import machine, show

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator

pytestmark = [needs_chromium, pytest.mark.timeout(240)]
MAX_INTERACTIONS = 6


class User:
    """Acts on the page by roles and texts only, and counts what it does."""

    def __init__(self, session: PageSession) -> None:
        self.session, self.page, self.interactions = session, session.page, 0

    def click(self, name: str, within: Locator | None = None, exact: bool = True) -> None:
        self._act()
        (within or self.page).get_by_role("button", name=name, exact=exact).click(timeout=60_000)

    def fill(self, label: str, text: str) -> None:
        self._act()
        search = self.page.get_by_role("searchbox", name=label, exact=True)
        self.page.get_by_role("textbox", name=label, exact=True).or_(search).fill(text)

    def choose(self, label: str, option: str) -> None:
        self._act()
        self.page.get_by_role("combobox", name=label, exact=True).select_option(option)

    def see(self, text: str | re.Pattern[str], within: Locator | None = None) -> str:
        """Return the text of the first element that contains it, when it is visible."""
        found = (within or self.page).get_by_text(text).first
        found.wait_for(timeout=60_000)
        return found.inner_text()

    def rows(self, table: str) -> list[list[str]]:
        rows = self.page.get_by_role("table", name=table).get_by_role("row").all()
        return [row.get_by_role("cell").or_(row.get_by_role("rowheader")).all_inner_texts() for row in rows[1:]]

    def _act(self) -> None:
        self.interactions += 1
        assert self.interactions <= MAX_INTERACTIONS


def test_who_leaks_since_when_and_the_time_left(browser: Browser, demo: RunningDaemon):
    verdict = TypeAdapter(Verdict).dump_python(VERDICT, mode="json")

    def with_leak(frame: Any) -> None:
        own = {"device_uuid": frame["snapshot"]["devices"][0]["uuid"]}
        frame["verdicts"] = [verdict | own]

    with open_page(browser, demo, rewrite=with_leak) as session:
        user = User(session)
        sentence = user.see(re.compile("train .+ is leaking"))
        assert "train (pid 4242) is leaking" in sentence
        assert "(since 13:38:20 UTC)" in sentence
        user.see("about 65 min left")
        user.see(re.compile(r"^since .*\d+:\d+:\d+$"))
        assert user.interactions == 0


def test_memory_is_free_with_proof(browser: Browser, demo: RunningDaemon):
    with signed_in(browser, demo) as session:
        # the evaluation leaves 2.88 GiB; a step uses 1.44 GiB of the cache, and returns it
        until(lambda: cached(demo, "train-llm") >= 2.5 * GIB, 120)
        user = User(session)
        user.click("Flush train-llm…")
        dialog = session.page.get_by_role("dialog", name="Flush")
        user.see("should release", dialog)
        user.click("Flush now", dialog)
        released = user.see(re.compile(r"^[\d.]+ GiB released\.$"), dialog)
        assert float(released.split()[0]) >= 2.5
        facts = dialog.get_by_role("article").inner_text().split("\n")
        assert facts[facts.index("counted by the driver") + 1] == released.removesuffix(" released.")


def cached(daemon: RunningDaemon, workload: str) -> int:
    known = [each["cached_bytes"] for each in daemon.get("processes") if each["workload"] == workload]
    return int(known[0] or 0) if known else 0


def test_alert_is_silenced_for_an_hour(browser: Browser, demo: RunningDaemon):
    put_rule(demo, name="noisy")
    with signed_in(browser, demo) as session:
        user = User(session)
        user.click("Silence noisy GPU 0")
        user.fill("Reason", "maintenance")
        user.click("Silence", session.page.get_by_role("dialog", name="Silence noisy"))
        user.click("1 silence")
        user.see(re.compile("^until "))
        (entry,) = demo.get("silences")
        silence = entry["silence"]
        assert silence["ends_at"] - silence["starts_at"] == pytest.approx(3600)


def test_workload_that_grew_since_an_hour_ago(browser: Browser, demo: RunningDaemon):
    with open_page(browser, demo) as session:
        frame = demo.get("frame")
        for process in frame["processes"]:
            process["used_bytes"] += 35 * GIB if process["workload"] == "chat-api" else 0
        show_frame(session, frame)
        user = User(session)
        user.choose("Change in", "1 h")
        user.choose("Group by", "workload")
        user.click("Change")
        user.see(re.compile(r"^\+3\d\.\d GiB$"))
        first, *_ = user.rows("Processes")
        assert first[1].startswith("chat-api")
        session.page.unroute(LIVE)


def test_before_and_after_are_compared(browser: Browser, demo: RunningDaemon):
    with signed_in(browser, demo) as session:
        user = User(session)
        user.click("Baselines")
        user.fill("Name", "before")
        user.fill("Duration", "2s")
        user.click("Record")
        user.see("complete, 2 s")
        user.click("Compare before")
        user.click("Measure now")
        user.see(re.compile(r"Measured since .+ for [23] s\."))
        measures = {tuple(row[:2]) for row in user.rows("Differences")}
        assert {(program, "used peak") for program in PROGRAMS} <= measures


def test_rule_is_made_and_shows_when_it_would_have_fired(browser: Browser, demo: RunningDaemon):
    rule = {"name": "half-full", "scope": "device", "value": "used_ratio", "above": 0.01}
    until(lambda: json.loads(demo.request("/api/v1/rules/preview", rule)[1])["fired"], 90, every=1.0)
    with signed_in(browser, demo) as session:
        user = User(session)
        user.click("Rules")
        user.click("New rule")
        user.fill("Name", "half-full")
        user.fill("Threshold", "1%")
        user.click("Preview")
        user.see(re.compile(r"The rule would have fired 1 time between \d+:\d+:\d+ and \d+:\d+:\d+\."))
        user.see(re.compile(r"^\d+:\d+:\d+ to now"))
        user.click("Save")
        user.see("1 firing", session.page.get_by_role("row", name="half-full"))
        assert demo.get("rules/half-full")["rule"]["above"] == 0.01


def test_largest_user_of_one_of_64_devices(browser: Browser, demo: RunningDaemon):
    with open_page(browser, demo) as session:
        frame = machine(64, 50)
        show(session, frame)
        user = User(session)
        user.click("GPU 37, ", exact=False)
        user.see("50 of 3200")
        first, *_ = user.rows("Processes")
        own = [each for each in frame["processes"] if each["device_uuid"] == "GPU-37"]
        largest = max(own, key=lambda each: each["used_bytes"])
        assert first[:2] == ["37", str(largest["pid"])]
        assert first[3] == largest["user"]
        session.page.unroute(LIVE)


def test_link_restores_the_view(browser: Browser, demo: RunningDaemon):
    with open_page(browser, demo) as session:
        session.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        user = User(session)
        user.choose("Group by", "workload")
        user.choose("Change in", "15 min")
        user.click("Program")
        user.fill("Filter", "chat-api")
        user.click("Copy link")
        user.see("Link copied")
        other = User(PageSession(session.page.context, session.page.evaluate("navigator.clipboard.readText()")))
        other.see("1 of 4, 1 group")
        ((_, group, *_),) = other.rows("Processes")
        assert group.startswith("chat-api")
        assert other.page.get_by_role("combobox", name="Change in").input_value() == "900"
