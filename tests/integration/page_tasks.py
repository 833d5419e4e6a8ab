"""Tasks of a user, each by mouse and by keyboard. Tests check their results and what they ask of a user, and
`bench.page` measures their time.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tests.helpers.browser import PageSession
from tests.helpers.running import RunningDaemon

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

Input = Literal["mouse", "keyboard"]
COUNT = """() => {
    window.inputs = { clicks: 0, keys: 0, commands: 0 };
    const count = event => {
        const { inputs } = window;
        if (event.type === 'pointerdown') inputs.clicks += 1;
        else inputs.keys += 1;
        if (event.type === 'pointerdown' || event.key === 'Enter') inputs.commands += 1;
    };
    for (const type of ['pointerdown', 'keydown']) addEventListener(type, count, true);
}"""
KEY_SECONDS, CLICK_SECONDS, DECISION_SECONDS = 0.28, 1.3, 1.35
"""What a user needs for a key, for pointing and clicking, and for a decision, as in the keystroke-level model of Card,
Moran and Newell (1980), with the keys of an average person who isn't a typist.
"""


@dataclass(frozen=True)
class Task:
    """``mouse`` and ``keyboard`` act, each with this input only; ``result`` waits for what the user wants to see."""

    name: str
    mouse: Callable[[Page], None]
    keyboard: Callable[[Page], None]
    result: Callable[[PageSession], None]

    def run(self, session: PageSession, by: Input) -> float:
        """Do the task, and return the seconds that it takes a user who knows the page: for the inputs, and for a
        decision at the start, at each click and at each Enter.
        """
        session.page.evaluate(COUNT)
        (self.mouse if by == "mouse" else self.keyboard)(session.page)
        self.result(session)
        done = session.page.evaluate("window.inputs")
        decisions = DECISION_SECONDS * (1 + done["commands"])
        return float(KEY_SECONDS * done["keys"] + CLICK_SECONDS * done["clicks"] + decisions)


def cached(daemon: RunningDaemon, workload: str) -> int:
    return sum(each["cached_bytes"] or 0 for each in daemon.get("processes") if each["workload"] == workload)


def command(page: Page, words: str) -> None:
    """Run the first command of the palette that contains these words."""
    page.keyboard.press("Control+k")
    page.keyboard.type(words)
    page.keyboard.press("Enter")


def _button(page: Page | Locator, name: str | re.Pattern[str]) -> Locator:
    return page.get_by_role("button", name=name, exact=isinstance(name, str)).first


def _sort_by_waste(page: Page) -> None:
    _button(page, "Waste").click()


def _waste_is_sorted(session: PageSession) -> None:
    session.page.locator(".of-waste[aria-sort=descending]").wait_for()


def flushing(workload: str) -> Task:
    """Return the task to flush a program, and to see the proof. Each flush needs its own: a cooldown follows it."""

    def click(page: Page) -> None:
        _button(page, f"Flush {workload}…").click()
        _button(page.get_by_role("dialog", name="Flush"), "Flush now").click()

    def press(page: Page) -> None:
        ready, empty = page.locator("#flush-now:focus"), page.locator("#flush-words", has_text="Nothing to flush.")
        command(page, f"flush {workload}")
        ready.or_(empty).first.wait_for()
        while empty.is_visible():  # the program has just used its cache: the attempt doesn't count
            page.keyboard.press("Escape")
            page.evaluate("Object.assign(window.inputs, { clicks: 0, keys: 0, commands: 0 })")
            command(page, f"flush {workload}")
            ready.or_(empty).first.wait_for()
        page.keyboard.press("Enter")

    def released(session: PageSession) -> None:
        session.page.get_by_role("dialog", name="Flush").get_by_text("counted by the driver").wait_for()

    return Task("flush a program", click, press, released)


def silencing(rule: str) -> Task:
    """Return the task to see the curve behind an alert, and to silence it for an hour with a reason."""

    def click(page: Page) -> None:
        _button(page, re.compile(f"^Chart {rule} ")).click()
        _button(page, re.compile(f"^Silence {rule} ")).click()
        dialog = page.get_by_role("dialog", name=f"Silence {rule}")
        page.locator("#silence-reason:focus").wait_for()
        page.keyboard.type("maintenance")
        _button(dialog, "Silence").click()

    def press(page: Page) -> None:
        for action in ("cha", "sil"):
            command(page, f"{action} {rule[:3]}")
        page.locator("#silence-reason:focus").wait_for()
        page.keyboard.type("maintenance")
        page.keyboard.press("Enter")

    def silenced(session: PageSession) -> None:
        card = session.page.locator(".card.quiet", has_text=rule)
        card.get_by_text("silenced").wait_for(state="attached")  # those that aren't silenced are listed first
        session.page.wait_for_function("() => location.hash.includes('range=')")  # it's written a moment later

    return Task("explain an alert, silence it", click, press, silenced)


def _click_minute(page: Page) -> None:
    page.locator("#events button").first.click()


def _press_minute(page: Page) -> None:
    command(page, "minute before")


def _minute_is_shown(session: PageSession) -> None:
    session.page.wait_for_function("() => /range=\\d+-\\d+/.test(location.hash)")
    session.page.locator("#hero .readout", has_text="used (driver)").wait_for()


def _click_compare(page: Page) -> None:
    for mark in page.get_by_role("button", name=re.compile("^Compare [a-z]")).all()[:2]:
        mark.click()
    _button(page, "Compare 2").click()


def _press_compare(page: Page) -> None:
    for key in "jxjxc":
        page.keyboard.press(key)


def _two_are_compared(session: PageSession) -> None:
    session.page.locator(".compared .plot path.series").nth(1).wait_for(state="attached")
    session.page.get_by_role("table", name="Differences between two moments").get_by_role("row").nth(2).wait_for()


TIME_BEFORE = "seconds => new Date(Date.now() - 1000 * seconds).toTimeString().slice(0, 8)"
MOMENTS_SHOWN = "[...document.querySelectorAll('[id$=-at]')].map(field => field.value)"


def _click_moments(page: Page) -> None:
    _click_compare(page)
    page.locator(".compared path.used").first.wait_for(state="attached")
    plot = page.locator(".compared .plot").nth(1)
    plot.click(position={"x": 100, "y": 50})
    plot.click(position={"x": 300, "y": 50}, modifiers=["Shift"])


def _press_moments(page: Page) -> None:
    _press_compare(page)
    page.locator(".compared path.used").first.wait_for(state="attached")
    page.keyboard.press("m")
    for seconds in (4, 2):
        page.keyboard.type(page.evaluate(TIME_BEFORE, seconds).replace(":", ""))
        page.keyboard.press("Enter")


def _two_moments_are_compared(session: PageSession) -> None:
    session.page.wait_for_function("() => /moment=.*until=/.test(location.hash)")
    at, end = session.page.evaluate(MOMENTS_SHOWN)
    session.page.get_by_role("heading", name=f"Between {at} and {end}").wait_for()


def _click_link(page: Page) -> None:
    _button(page, "Copy link").click()


def _press_link(page: Page) -> None:
    command(page, "copy link")


def _link_is_copied(session: PageSession) -> None:
    session.shows("Link copied")


def finding(words: str) -> Task:
    """Return the task to find the only process with these words."""

    def click(page: Page) -> None:
        page.get_by_label("Filter").click()
        page.keyboard.type(words)

    def press(page: Page) -> None:
        page.keyboard.press("/")
        page.keyboard.type(words)

    def found(session: PageSession) -> None:
        session.page.locator("#shown", has_text=re.compile("^1 of ")).wait_for()
        assert session.page.locator("tbody.process").count() == 1

    return Task("find a process", click, press, found)


def _click_export(page: Page) -> None:
    _button(page.get_by_role("group", name="Download processes"), "CSV").click()


def _press_export(page: Page) -> None:
    command(page, "download csv")


def _exporting(act: Callable[[Page], None], columns: str) -> Callable[[Page], None]:
    def exported(page: Page) -> None:
        with page.expect_download() as saved:
            act(page)
        assert saved.value.path().read_text().startswith(columns)

    return exported


def _click_chart(page: Page) -> None:
    _button(page, "CSV of the chart").click()


def _press_chart(page: Page) -> None:
    command(page, "chart csv")


def explaining(kind: str) -> Task:
    """Return the task to see what the memory of a program with this problem consists of."""

    def click(page: Page) -> None:
        _button(page, re.compile(f"^Why {kind} ")).click()

    def press(page: Page) -> None:
        command(page, f"why {kind}")

    def explained(session: PageSession) -> None:
        session.page.locator("#why article").get_by_text("Next steps").wait_for()

    return Task("explain a program", click, press, explained)


WASTE = Task("find the most waste", _sort_by_waste, lambda page: command(page, "sort waste"), _waste_is_sorted)
MINUTE = Task("zoom into a minute", _click_minute, _press_minute, _minute_is_shown)
COMPARE = Task("compare two programs", _click_compare, _press_compare, _two_are_compared)
MOMENTS = Task("compare two moments", _click_moments, _press_moments, _two_moments_are_compared)
LINK = Task("share the view", _click_link, _press_link, _link_is_copied)
EXPORT = Task(
    "export",
    _exporting(_click_export, "taken_at,gpu,"),
    _exporting(_press_export, "taken_at,gpu,"),
    lambda session: None,
)
CHART = Task(
    "export a chart",
    _exporting(_click_chart, "from,to,gpu,"),
    _exporting(_press_chart, "from,to,gpu,"),
    lambda session: None,
)
QUEUE = Task(
    "see the queue",
    lambda page: _button(page, "Queue").click(),
    lambda page: command(page, "queue"),
    lambda session: session.page.get_by_role("heading", name="Queue").wait_for(),
)
