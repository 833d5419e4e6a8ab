"""Several windows of one browser on one daemon."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest

from tests.integration.browser import PROGRAMS, Serve, Sight, looking, needs_chromium, ready, sign_in
from tests.running import RunningDaemon, until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Route

pytestmark = [needs_chromium, pytest.mark.timeout(180)]

WINDOWS = 8
"""More than the six connections that a browser opens to one address."""
FRAMES = 40
"""20 s of the demo's frames."""


def seq(sight: Sight) -> int:
    return int(sight.page.evaluate("document.documentElement.dataset.seq ?? 0"))


def advances(sights: Sequence[Sight], frames: int) -> None:
    """Waits until each window shows a frame that is so many frames later, without a notice."""
    for sight in sights:
        sight.page.locator("tbody").first.wait_for()
    start = max(map(seq, sights))
    for sight in sights:
        sight.page.wait_for_function(
            "seq => document.documentElement.dataset.seq >= seq", arg=start + frames, timeout=60_000
        )
        assert sight.texts("#notices") == [[""]]


def requesting(sights: Sequence[Sight]) -> list[Sight]:
    return [sight for sight in sights if any(url.endswith("/frame") for url in sight.asked)]


def test_eight_windows_are_live_and_one_requests_for_all(browser: Browser, demo: RunningDaemon):
    with looking(browser, demo) as first:
        context = first.page.context
        sights = [first, *(Sight(context, demo.url) for _ in range(WINDOWS - 1))]
        advances(sights, FRAMES)
        assert requesting(sights) == [first]
        first.page.locator("#events .agent-connected").first.wait_for()
        newest = first.texts("#events bdi")[0]
        until(lambda: all(sight.texts("#events bdi")[0][-len(newest) :] == newest for sight in sights[1:]))
        first.page.close()
        sights.remove(first)
        advances(sights, 4)
        assert len(requesting(sights)) == 1
        assert [complaint for sight in sights for complaint in sight.complaints] == []


def test_a_hidden_window_hands_over_and_comes_back(browser: Browser, demo: RunningDaemon):
    hide = """hidden => {
        Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });
        document.dispatchEvent(new Event('visibilitychange'));
    }"""
    with looking(browser, demo) as first:
        second = Sight(first.page.context, demo.url)
        advances([first, second], 2)
        first.page.evaluate(hide, True)
        advances([second], 4)
        assert requesting([second]) == [second]
        first.asked.clear()
        first.page.evaluate(hide, False)
        advances([first, second], 4)
        assert requesting([first]) == []


def test_without_web_locks_each_window_requests_for_itself(browser: Browser, demo: RunningDaemon):
    """Browsers have them on HTTPS and on this machine only, not on plain HTTP to another host."""
    with looking(browser, demo) as sight:
        context = sight.page.context
        context.add_init_script("delete Navigator.prototype.locks")
        sights = [Sight(context, demo.url) for _ in range(WINDOWS)]
        advances(sights, FRAMES // 2)
        assert requesting(sights) == sights


def test_a_window_without_a_token_sees_nothing_of_one_with_a_token(browser: Browser, demo: RunningDaemon):
    def guard(route: Route) -> None:
        if route.request.headers.get("authorization", "").startswith("Bearer gpm_"):
            route.continue_()
        else:
            problem = {"title": "Unauthorized", "status": 401, "detail": "reading requires a token"}
            route.fulfill(status=401, json=problem, content_type="application/problem+json")

    with looking(browser, demo, guard=guard) as first:
        second = Sight(first.page.context, demo.url)
        for sight in (first, second):
            sight.shows("Sign in to see this page")
        first.page.get_by_role("button", name="Sign in").click()
        sign_in(first, demo)
        advances([first], 4)
        assert not second.page.locator("#content").is_visible()
        assert second.texts("#events li") == [[]]


def test_too_many_connections_of_the_browser_are_told_from_a_daemon_that_does_not_answer(
    browser: Browser, demo: RunningDaemon
):
    with looking(browser, demo) as sight:
        advances([sight], 1)
        other = sight.page.context.new_page()
        other.goto(f"{demo.url}/docs")
        other.evaluate("() => { for (let place = 0; place < 6; place++) new EventSource('/api/v1/events'); }")
        sight.shows("This browser has too many connections to the daemon")
        other.close()
        sight.page.locator("#content").wait_for()
        advances([sight], 2)
        sight.complaints[:] = [each for each in sight.complaints if not each.startswith("WebSocket connection to")]


def test_a_daemon_that_is_stopped_does_not_answer(browser: Browser, serve: Serve):
    daemon = serve("--interval", "0.5", verb="demo")
    ready(daemon, PROGRAMS)
    with looking(browser, daemon) as sight:
        advances([sight], 1)
        daemon.process.send_signal(signal.SIGSTOP)
        try:
            sight.shows("The daemon does not answer")
        finally:
            daemon.process.send_signal(signal.SIGCONT)
        advances([sight], 2)
        sight.complaints[:] = [each for each in sight.complaints if not each.startswith("WebSocket connection to")]
