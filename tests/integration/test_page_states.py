"""The page without a driver, a device, an agent, or the daemon itself."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from gpumond import __version__
from gpumond.facts.snapshot import MAX_MISSED_READINGS
from gpumond.facts.units import size_text
from tests.fakenvml import FakeDriver, Process, machine
from tests.helpers.agents import GIB
from tests.helpers.browser import Serve, check_access, needs_chromium, open_page
from tests.helpers.running import until

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [needs_chromium, pytest.mark.timeout(180)]


def test_page_without_a_driver_shows_the_remedy(browser: Browser, serve: Serve):
    daemon = serve("--source", "nvml")
    with open_page(browser, daemon) as session:
        session.shows("No GPU can be read (library_not_found)")
        session.shows("gpumond demo")


def test_page_without_a_device_has_a_note(browser: Browser, serve: Serve, driver: FakeDriver):
    driver.write()
    daemon = serve("--source", "nvml", environ=driver.env)
    with open_page(browser, daemon) as session:
        until(lambda: daemon.request("/-/ready")[0] == 200)
        session.shows("No GPU found")


def test_page_names_a_hanging_driver_and_withdraws_its_values(browser: Browser, serve: Serve, driver: FakeDriver):
    driver.devices = machine(2)
    driver.devices[0].used_bytes = 5 * GIB
    driver.write()
    daemon = serve("--source", "nvml", "--interval", "1s", environ=driver.env)
    with open_page(browser, daemon) as session:
        session.shows("of 282.0 GiB used")
        driver.hang("nvmlDeviceGetCount_v2", seconds=60)
        driver.write()
        session.shows("values are 1 reading old")
        session.shows("values are hidden")
        session.shows("timeout")
        until(lambda: not [text for text in session.texts(".total")[0] if text])
        assert set(session.texts(".legend dd")[0]) <= {size_text(0)}


def test_page_shows_how_to_start_an_agent_and_the_last_values_without_the_daemon(
    browser: Browser, serve: Serve, driver: FakeDriver
):
    driver.devices = machine(1)
    driver.devices[0].processes = [Process(1, 3 * GIB)]
    driver.devices[0].used_bytes = 4 * GIB
    driver.write()
    daemon = serve("--source", "nvml", environ=driver.env)
    with open_page(browser, daemon) as session:
        session.shows("gpumond run --workload train")
        assert session.texts("tbody .of-opaque") == [[size_text(3 * GIB)]]
        assert session.page.get_by_role("button", name="Flush").count() == 0
        session.shows("of 141.0 GiB used")
        daemon.process.send_signal(signal.SIGKILL)
        session.shows("The daemon doesn't respond")
        session.shows("If the daemon has stopped, restart it.")
        session.page.wait_for_timeout(1000 * (MAX_MISSED_READINGS + 2))  # each second, another request fails
        session.page.locator("header").get_by_text("no response since ").wait_for()
        assert session.texts("tbody .of-opaque", "#version") == [[size_text(3 * GIB)], [f"gpumond {__version__}"]]
        assert session.page.locator("#content").evaluate("node => getComputedStyle(node).filter") == "grayscale(1)"
        check_access(session)
