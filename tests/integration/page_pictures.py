"""Draws docs/images/page-*.png from real daemons in each state: ``python -m tests.integration.page_pictures``."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image  # comes with matplotlib

from gpumond.testing import GIB
from tests.fakenvml import FakeDriver, Process, build, machine
from tests.integration.browser import PHONE, PROGRAMS, WIDE, Sight, chromium, looking, ready, sign_in
from tests.running import RunningDaemon, until

if TYPE_CHECKING:
    from playwright.sync_api import Browser

IMAGES = Path(__file__).parents[2] / "docs" / "images"
MAX_BYTES = 150_000


def main() -> None:
    wanted = set(sys.argv[1:])
    with tempfile.TemporaryDirectory(prefix="gpumond-pictures-") as directory, chromium() as browser:
        root = Path(directory)
        for draw in (_demo, _machine, _no_driver):
            if not wanted or draw.__name__.strip("_") in wanted:
                draw(browser, root)


def _demo(browser: Browser, root: Path) -> None:
    with _daemon(root / "demo", verb="demo") as daemon:
        ready(daemon, PROGRAMS)
        until(lambda: any(alert["rule"] == "leak" for alert in daemon.get("alerts")), 180)
        time.sleep(20)
        with looking(browser, daemon, {"width": 1280, "height": 900}) as sight:
            _open_first(sight)
            _save(sight, "light")
        with looking(browser, daemon, color_scheme="dark") as sight:
            _open_first(sight)
            _save(sight, "dark")
        with looking(browser, daemon, PHONE, device_scale_factor=2) as sight:
            sight.page.locator("tbody").first.wait_for()
            sight.page.wait_for_timeout(1000)
            _save(sight, "phone")
        with looking(browser, daemon) as sight:
            until(lambda: _cached(daemon, "training") > GIB // 2, 60)
            sight.page.get_by_role("button", name="Flush training…").click()
            sign_in(sight, daemon)
            sight.shows("is expected to release")
            _save(sight, "plan", whole=False)
            sight.page.get_by_role("button", name="Flush now").click()
            sight.shows(" released.")
            _save(sight, "receipt", whole=False)
        with looking(browser, daemon) as sight:
            sight.page.locator("tbody").first.wait_for()
            daemon.stop()
            sight.page.locator("#content").wait_for(state="hidden")
            _save(sight, "daemon-gone", whole=False)


TRAIN = "import sys; open('/proc/self/comm', 'w').write('train'); sys.stdin.read()"


def _machine(browser: Browser, root: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", TRAIN], stdin=subprocess.PIPE) as program:
        _without_agents(browser, root, program.pid)


def _without_agents(browser: Browser, root: Path, pid: int) -> None:
    driver = FakeDriver(root, build(root), machine(2))
    for place, device in enumerate(driver.devices):
        device.virtualization, device.addressing = None, None
        device.processes = [Process(pid, (20 + 39 * place) * GIB)]
        device.used_bytes = (22 + 39 * place) * GIB
        device.gpu_utilization, device.temperature, device.power = 70 + place, 55 + place, 400_000 + 9_000 * place
    driver.write()
    with _daemon(root / "machine", "--source", "nvml", environ=driver.env) as daemon, looking(browser, daemon) as sight:
        sight.page.locator("tbody").first.wait_for()
        _save(sight, "no-agents")
        driver.hang("nvmlDeviceGetCount_v2", seconds=120)
        driver.write()
        sight.shows("values are 1 reading old")
        _save(sight, "stale")
        sight.shows("values are hidden")
        sight.page.wait_for_timeout(5000)
        _save(sight, "driver-hung")


def _no_driver(browser: Browser, root: Path) -> None:
    with _daemon(root / "none", "--source", "nvml") as daemon, looking(browser, daemon) as sight:
        sight.shows("No device can be read")
        _save(sight, "no-gpu", whole=False)


@contextmanager
def _daemon(directory: Path, *options: str, **fields: Any) -> Iterator[RunningDaemon]:
    daemon = RunningDaemon(directory, *options, **fields)
    try:
        yield daemon
    finally:
        if daemon.process.poll() is None:
            daemon.stop()


def _open_first(sight: Sight) -> None:
    sight.page.locator("tbody .of-program button").first.click()
    sight.page.locator("tbody svg").wait_for()
    sight.page.mouse.move(0, 0)
    sight.page.wait_for_timeout(1000)


def _cached(daemon: RunningDaemon, workload: str) -> int:
    return int(
        sum(process["cached_bytes"] or 0 for process in daemon.get("processes") if process["workload"] == workload)
    )


def _save(sight: Sight, name: str, whole: bool = True) -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    if not whole:
        sight.page.set_viewport_size({**WIDE, "height": 620})
    path = IMAGES / f"page-{name}.png"
    drawn = Image.open(BytesIO(sight.page.screenshot(full_page=whole)))
    few = drawn.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(path, optimize=True)
    assert path.stat().st_size <= MAX_BYTES, f"{path} has {path.stat().st_size} bytes"


if __name__ == "__main__":
    main()
