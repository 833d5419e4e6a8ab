"""The page where something is missing: a driver, a device, an agent, the daemon itself."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from gpumond.model.units import human
from gpumond.testing import GIB
from tests.fakenvml import FakeDriver, Process, machine
from tests.integration.browser import Serve, looking, needs_chromium
from tests.running import until

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [needs_chromium, pytest.mark.timeout(180)]


def test_without_a_driver_it_says_what_to_do(browser: Browser, serve: Serve):
    daemon = serve("--source", "nvml")
    with looking(browser, daemon) as sight:
        sight.shows("Devices cannot be read: library_not_found")
        sight.shows("gpumond demo")


def test_without_a_device_it_says_so(browser: Browser, serve: Serve, driver: FakeDriver):
    driver.write()
    daemon = serve("--source", "nvml", environ=driver.env)
    with looking(browser, daemon) as sight:
        until(lambda: daemon.request("/-/ready")[0] == 200)
        sight.shows("There is no device")


def test_a_driver_that_hangs_is_named_and_its_numbers_are_withdrawn(browser: Browser, serve: Serve, driver: FakeDriver):
    driver.devices = machine(2)
    driver.devices[0].used_bytes = 5 * GIB
    driver.write()
    daemon = serve("--source", "nvml", "--interval", "1", environ=driver.env)
    with looking(browser, daemon) as sight:
        sight.shows("of 141.0 GiB used")
        driver.hang("nvmlDeviceGetCount_v2", seconds=60)
        driver.write()
        sight.shows("values are 1 reading old")
        sight.shows("values are hidden")
        sight.shows("timeout")
        until(lambda: not [text for text in sight.texts(".total")[0] if text])
        assert sight.texts(".legend dd") == [[]]


def test_without_an_agent_it_says_how_to_start_one(browser: Browser, serve: Serve, driver: FakeDriver):
    driver.devices = machine(1)
    driver.devices[0].processes = [Process(1, 3 * GIB)]
    driver.devices[0].used_bytes = 4 * GIB
    driver.write()
    daemon = serve("--source", "nvml", environ=driver.env)
    with looking(browser, daemon) as sight:
        sight.shows("gpumond run --workload train")
        assert sight.texts("tbody .of-opaque") == [[human(3 * GIB)]]
        assert sight.page.get_by_role("button", name="Flush").count() == 0


def test_a_daemon_that_is_gone_leaves_no_numbers_behind(browser: Browser, serve: Serve, driver: FakeDriver):
    driver.devices = machine(1)
    driver.write()
    daemon = serve("--source", "nvml", environ=driver.env)
    with looking(browser, daemon) as sight:
        sight.shows("of 141.0 GiB used")
        sight.page.context.set_offline(True)
        sight.shows("The daemon does not answer")
        sight.page.locator("#content").wait_for(state="hidden")
        sight.page.context.set_offline(False)
        sight.shows("of 141.0 GiB used")
        assert sight.texts("#notices") == [[""]]
        daemon.process.send_signal(signal.SIGKILL)
        sight.page.locator("#content").wait_for(state="hidden", timeout=20_000)
