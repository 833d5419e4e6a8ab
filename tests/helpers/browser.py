"""Real Chromium on the daemon's page."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers.running import RunningDaemon, until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page, Route

CHROMIUM = shutil.which("chromium-headless-shell") or shutil.which("chromium") or shutil.which("google-chrome")
"""The first has no windows of its own, and needs half the processor time of the others."""

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-lcd-text",
)
MISSING = [
    what
    for what, there in (("chromium-headless-shell (apt)", CHROMIUM), ("playwright (pip)", find_spec("playwright")))
    if there is None
]
needs_chromium = pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}")
WIDE = {"width": 1280, "height": 900}
PHONE = {"width": 360, "height": 780}
PROGRAMS = ("train-llm", "chat-api", "notebook", "etl")
"""Workloads of the demo."""

LIVE = "**/api/v1/live"
"""Route of the stream of frames."""

Serve = Callable[..., RunningDaemon]
NETWORK = ("Failed to load resource", "net::ERR_")
"""Prefix of Chromium's messages about an error response or a missing response, where those are expected."""


@contextmanager
def chromium() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


PROBE = "WebSocket connection to "
"""Beginning of the message about the connection with which the page asks whether a slow daemon is reachable, and which
the daemon refuses."""


class PageSession:
    """One tab of the page. Errors and warnings of the console are kept, including violations of the page's policy."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.complaints: list[str] = []
        self.failed_requests: list[str] = []
        self.frames: dict[int, Any] = {}
        self.requested_urls: list[str] = []
        self.page: Page = context.new_page()
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("requestfailed", lambda request: self.failed_requests.append(f"{request.url}: {request.failure}"))
        self.page.on("request", lambda request: self.requested_urls.append(request.url))
        self.page.goto(url)

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning") and not message.text.startswith((*NETWORK, PROBE)):
            self.complaints.append(message.text)

    def shows_content(self) -> None:
        """Wait for the tables."""
        self.page.locator("tbody:visible").first.wait_for()

    def described(self) -> str:
        """Return what the page shows, and what went wrong."""
        text = self.page.locator("body").inner_text()
        return f"the page shows {text!r}; {self.failed_requests=}; {self.complaints=}"

    def texts(self, *selectors: str) -> list[list[str]]:
        """Return the texts of all selectors at one time, because the page changes between two calls."""
        script = "all => all.map(one => [...document.querySelectorAll(one)].map(node => node.textContent))"
        found: list[list[str]] = self.page.evaluate(script, list(selectors))
        return found

    def address(self) -> str:
        """Return the address that the page has set. ``page.url`` is that of an earlier moment."""
        return str(self.page.evaluate("location.href"))

    def fits(self) -> bool:
        """Return whether the page needs no horizontal scrolling."""
        return bool(self.page.evaluate("document.documentElement.scrollWidth <= innerWidth"))

    def shows(self, text: str, seconds: float = 60.0) -> None:
        self.page.get_by_text(text).first.wait_for(timeout=1000 * seconds)


@contextmanager
def open_page(
    browser: Browser,
    daemon: RunningDaemon,
    viewport: dict[str, int] | None = None,
    rewrite: Callable[[Any], None] | None = None,
    guard: Callable[[Route], None] | None = None,
    **options: Any,
) -> Iterator[PageSession]:
    """Open the page in a tab. ``rewrite`` changes each frame before the page receives it, on a stream that ends after
    it; ``guard`` answers API requests. A wait in vain fails with what the page shows.
    """
    from playwright.sync_api import TimeoutError as Late

    context = browser.new_context(viewport=viewport or WIDE, reduced_motion="reduce", **options)
    context.set_default_timeout(60_000)

    def through(route: Route) -> None:
        answer = route.fetch(url=f"{daemon.url}/api/v1/frame")
        if rewrite is None or answer.status != 200:
            route.fulfill(response=answer)
            return
        frame = answer.json()
        rewrite(frame)
        events = context.request.get(f"{daemon.url}/api/v1/events", headers={"Accept": "application/json"}).json()
        route.fulfill(**stream_of(frame, events))

    if rewrite:
        context.route(LIVE, through)
    if guard:
        context.route("**/api/v1/**", guard)
    session = PageSession(context, daemon.url)
    try:
        yield session
        context.unroute_all(behavior="wait")
    except Late as late:
        raise AssertionError(f"{late}; {session.described()}") from late
    finally:
        context.close()
    assert session.complaints == [], session.complaints


def stream_of(frame: Any, events: Sequence[Any] = ()) -> dict[str, Any]:
    """Return the answer of the route of the stream with one frame."""
    data = json.dumps(frame | {"events": list(events)})
    return {"content_type": "text/event-stream", "body": f"event: frame\ndata: {data}\n\n"}


def show_frame(session: PageSession, frame: Any, events: Sequence[Any] = ()) -> None:
    """Make the page show this frame until ``session.page.unroute(LIVE)``."""
    session.page.route(LIVE, lambda route: route.fulfill(**stream_of(frame, events)))
    session.page.reload()
    session.page.wait_for_function(
        "seq => document.documentElement.dataset.seq === seq", arg=str(frame["snapshot"]["seq"]), timeout=60_000
    )


def sign_in(session: PageSession, daemon: RunningDaemon) -> None:
    session.page.get_by_label("Token").fill(token_of(daemon))
    session.page.get_by_label("Token").press("Enter")


@contextmanager
def signed_in(browser: Browser, daemon: RunningDaemon, view: str = "", **options: Any) -> Iterator[PageSession]:
    """Open a view of the page signed in, as `gpumond open` does."""
    with open_page(browser, daemon, **options) as session:
        session.page.goto(f"{daemon.url}/#code={code_of(daemon)}&view={view}")
        session.page.get_by_role("button", name="Sign out").wait_for()
        yield session


def code_of(daemon: RunningDaemon) -> str:
    _, answer, _ = daemon.request("/api/v1/sessions/code", {}, Authorization=f"Bearer {token_of(daemon)}")
    return str(json.loads(answer)["code"])


def token_of(daemon: RunningDaemon) -> str:
    return (daemon.directory / "token").read_text().strip()


def put_rule(daemon: RunningDaemon, **fields: Any) -> None:
    """Create or replace a rule, which all devices breach if no field differs."""
    rule = {"name": "present", "scope": "device", "value": "up", "above": 0} | fields
    rule |= {"labels": {"severity": "critical"}}
    status, answer, _ = daemon.request(
        f"/api/v1/rules/{rule['name']}", rule, "PUT", Authorization=f"Bearer {token_of(daemon)}"
    )
    assert status == 200, answer


def ready(daemon: RunningDaemon, workloads: Sequence[str]) -> None:
    until(lambda: daemon.request("/-/ready")[0] == 200)
    until(lambda: {agent["workload"] for agent in daemon.get("agents") if agent["pools"]} >= set(workloads))


def axe() -> Path | None:
    """Script of axe-core, if it is installed: see .ci/run."""
    path = Path(__file__).parents[2] / "build" / "axe" / "package" / "axe.min.js"
    return path if path.exists() else None


CHECK = """async () => (await axe.run(document, {
    resultTypes: ['violations'], rules: { 'target-size': { enabled: true } }
})).violations
    .map(found => [found.id, found.impact, found.nodes.map(node => node.target.join(' '))])"""


def check_access(session: PageSession) -> None:
    """Check the page with axe, if it is installed."""
    script = axe()
    if script:
        session.page.evaluate(script.read_text())
        found = session.page.evaluate(CHECK)
        assert found == [], found
