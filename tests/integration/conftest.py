"""Chromium and a demo for the tests of the page, one of each for a file of tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.helpers.browser import PROGRAMS, PageSession, chromium, open_page, ready
from tests.helpers.running import RunningDaemon

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    with RunningDaemon(tmp_path_factory.mktemp("page") / "demo", "--interval", "0.5s", command="demo") as daemon:
        ready(daemon, PROGRAMS)
        yield daemon


@pytest.fixture
def session(browser: Browser, demo: RunningDaemon) -> Iterator[PageSession]:
    with open_page(browser, demo) as session:
        session.shows_content()
        yield session
