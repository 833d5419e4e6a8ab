"""Several windows of one browser on one daemon."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest

from tests.helpers.browser import PageSession, needs_chromium, open_page, sign_in
from tests.helpers.running import RunningDaemon, until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Route

pytestmark = [needs_chromium, pytest.mark.timeout(180)]

WINDOWS = 8
"""More than the six connections that a browser opens to one address."""
FRAMES = 20
"""10 s of the demo's frames: longer than the time after which a window without messages requests frames itself."""
HIDE = """hidden => {
    Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });
    document.dispatchEvent(new Event('visibilitychange'));
}"""
"""Script that makes a window hidden or visible."""
CONNECT = """() => Promise.all([...Array(6)].map(() => new Promise(resolve => {
    new EventSource('/api/v1/events').onopen = resolve;
})))"""
"""Script that opens the six connections that a browser allows for one address."""


def seq(session: PageSession) -> int:
    return int(session.page.evaluate("document.documentElement.dataset.seq ?? 0"))


def advances(sessions: Sequence[PageSession], frames: int) -> None:
    """Wait until each window shows a frame at least this number of frames later, without a notice."""
    for session in sessions:
        session.shows_content()
    start = max(map(seq, sessions))
    for session in sessions:
        session.page.wait_for_function(
            "seq => document.documentElement.dataset.seq >= seq", arg=start + frames, timeout=60_000
        )
        assert session.texts("#notices") == [[""]]


def requesting(sessions: Sequence[PageSession]) -> list[PageSession]:
    return [session for session in sessions if any(url.endswith(("/live", "/frame")) for url in session.requested_urls)]


def forget_requests(sessions: Sequence[PageSession]) -> None:
    for session in sessions:
        session.requested_urls.clear()


def test_eight_windows_are_live_and_one_requests_for_all(browser: Browser, demo: RunningDaemon):
    with open_page(browser, demo) as first:
        context = first.page.context
        sessions = [first, *(PageSession(context, demo.url) for _ in range(WINDOWS - 1))]
        advances(sessions, 2)
        forget_requests(sessions)  # each window requests the stream before it knows of the others
        advances(sessions, FRAMES)
        assert requesting(sessions) == []
        first.page.locator("#events .agent-connected").first.wait_for()
        newest = first.texts("#events bdi")[0]
        until(lambda: all(session.texts("#events bdi")[0][-len(newest) :] == newest for session in sessions[1:]))
        first.page.close()
        sessions.remove(first)
        advances(sessions, 4)
        assert len(requesting(sessions)) == 1
        assert [complaint for session in sessions for complaint in session.complaints] == []


def test_hidden_window_hands_its_requests_to_another_and_returns(browser: Browser, demo: RunningDaemon):
    with open_page(browser, demo) as first:
        second = PageSession(first.page.context, demo.url)
        advances([first, second], 2)
        forget_requests([first, second])
        first.page.evaluate(HIDE, True)
        advances([second], 4)
        assert requesting([first, second]) == [second]
        first.page.evaluate(HIDE, False)
        advances([first, second], 4)
        assert requesting([first]) == []


def test_windows_without_web_locks_each_request_for_themselves(browser: Browser, demo: RunningDaemon):
    """Browsers have Web Locks on HTTPS and on the local machine only, not on plain HTTP to another host."""
    with open_page(browser, demo) as session:
        context = session.page.context
        context.add_init_script("delete Navigator.prototype.locks")
        sessions = [PageSession(context, demo.url) for _ in range(WINDOWS)]
        advances(sessions, FRAMES // 4)
        assert requesting(sessions) == sessions


def test_window_without_a_token_gets_no_data_of_one_with_a_token(browser: Browser, demo: RunningDaemon):
    def guard(route: Route) -> None:
        if route.request.headers.get("authorization", "").startswith("Bearer gpm_"):
            route.continue_()
        else:
            problem = {"title": "Unauthorized", "status": 401, "detail": "reading requires a token"}
            route.fulfill(status=401, json=problem, content_type="application/problem+json")

    with open_page(browser, demo, guard=guard) as first:
        second = PageSession(first.page.context, demo.url)
        for session in (first, second):
            session.shows("Sign in to see this page")
        first.page.get_by_role("button", name="Sign in").click()
        sign_in(first, demo)
        advances([first], 4)
        assert not second.page.locator("#content").is_visible()
        assert second.texts("#events li") == [[]]


def test_refusal_of_an_older_request_does_not_erase_a_newer_token(browser: Browser, demo: RunningDaemon):
    problem = {"title": "Unauthorized", "status": 401, "detail": "reading requires a token"}
    refusal = {"status": 401, "json": problem, "content_type": "application/problem+json"}
    held: list[Route] = []
    signing = False

    def guard(route: Route) -> None:
        if route.request.headers.get("authorization", "").startswith("Bearer gpm_"):
            route.continue_()
        elif signing:
            held.append(route)
        else:
            route.fulfill(**refusal)

    with open_page(browser, demo, guard=guard) as session:  # from the first request on: a stream that is open continues
        session.shows("Sign in to see this page")
        session.page.get_by_role("button", name="Sign in").click()
        signing = True
        while not held:
            session.page.wait_for_timeout(100)
        sign_in(session, demo)
        held.pop(0).fulfill(**refusal)
        advances([session], 4)


def test_connection_limit_of_the_browser_is_distinguished_from_a_silent_daemon(browser: Browser, demo: RunningDaemon):
    with open_page(browser, demo) as session:
        advances([session], 1)
        other = session.page.context.new_page()
        other.goto(f"{demo.url}/docs")
        session.page.evaluate(HIDE, True)  # closes its stream
        other.evaluate(CONNECT)
        session.page.evaluate(HIDE, False)
        session.shows("This browser has too many connections to the daemon")
        other.close()
        session.page.locator("#content").wait_for()
        advances([session], 2)


def test_stopped_daemon_is_shown_as_not_answering(browser: Browser, demo: RunningDaemon):
    with open_page(browser, demo) as session:
        advances([session], 1)
        demo.process.send_signal(signal.SIGSTOP)
        try:
            session.shows("The daemon doesn't respond")
            session.shows("If the daemon has stopped, restart it.")
        finally:
            demo.process.send_signal(signal.SIGCONT)
        advances([session], 2)


def test_paused_window_keeps_its_frame_and_hands_its_requests_to_another(browser: Browser, demo: RunningDaemon):
    with open_page(browser, demo) as first:
        second = PageSession(first.page.context, demo.url)
        advances([first, second], 2)
        first.page.keyboard.press("p")
        first.shows("paused")
        before = seq(first)
        advances([second], 4)
        assert seq(first) == before
        first.page.evaluate("performance.now = () => Performance.prototype.now.call(performance) + 600_000")
        first.shows("paused 10 min ago")
        first.page.get_by_role("button", name="Overview", exact=True).click()
        assert first.texts("#notices p") == [[]]
        first.page.get_by_role("button", name="Resume").click()
        assert first.texts("#notices p") == [[]]
        advances([first, second], 4)
        assert "paused" not in first.texts("#moment")[0][0]
