"""A Chromium and a demo for the page's tests, both for as long as a file of tests takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.integration.browser import PROGRAMS, Sight, chromium, looking, ready
from tests.running import RunningDaemon

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    daemon = RunningDaemon(tmp_path_factory.mktemp("page") / "demo", "--interval", "0.5", verb="demo")
    ready(daemon, PROGRAMS)
    yield daemon
    daemon.stop()


@pytest.fixture
def sight(browser: Browser, demo: RunningDaemon) -> Iterator[Sight]:
    with looking(browser, demo) as sight:
        sight.page.locator("tbody").first.wait_for()
        yield sight
