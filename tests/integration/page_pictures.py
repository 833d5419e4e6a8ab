"""Update docs/images/page-*.png from real daemons in each state: ``python -m tests.integration.page_pictures``."""

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

from tests.fakenvml import FakeDriver, Process, build, machine
from tests.helpers.agents import GIB
from tests.helpers.browser import PHONE, PROGRAMS, WIDE, PageSession, chromium, open_page, ready, sign_in
from tests.helpers.running import RunningDaemon, until

if TYPE_CHECKING:
    from playwright.sync_api import Browser

IMAGES = Path(__file__).parents[2] / "docs" / "images"
MAX_BYTES = 200_000


def main() -> None:
    wanted = set(sys.argv[1:])
    with tempfile.TemporaryDirectory(prefix="gpumond-pictures-") as directory, chromium() as browser:
        root = Path(directory)
        for draw in (_demo, _machine, _no_driver):
            if not wanted or draw.__name__.strip("_") in wanted:
                draw(browser, root)


def _demo(browser: Browser, root: Path) -> None:
    with _daemon(root / "demo", command="demo") as daemon:
        ready(daemon, PROGRAMS)
        until(lambda: any(alert["rule"] == "leak" for alert in daemon.get("alerts")), 180)
        time.sleep(20)
        with open_page(browser, daemon, {"width": 1280, "height": 900}) as session:
            _open_first(session)
            _save(session, "light")
        with open_page(browser, daemon, color_scheme="dark") as session:
            _open_first(session)
            _save(session, "dark")
        with open_page(browser, daemon, PHONE, device_scale_factor=2) as session:
            session.page.locator("tbody").first.wait_for()
            session.page.wait_for_timeout(1000)
            _save(session, "phone")
        with open_page(browser, daemon) as session:
            until(lambda: _cached(daemon, "training") > GIB // 2, 60)
            session.page.get_by_role("button", name="Flush training…").click()
            sign_in(session, daemon)
            session.shows("should release")
            _save(session, "plan", whole=False)
            session.page.get_by_role("button", name="Flush now").click()
            session.shows(" released.")
            _save(session, "receipt", whole=False)
        with open_page(browser, daemon) as session:
            session.page.locator("tbody").first.wait_for()
            daemon.stop()
            session.page.locator("#content").wait_for(state="hidden")
            _save(session, "daemon-gone", whole=False)


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
    with (
        _daemon(root / "machine", "--source", "nvml", environ=driver.env) as daemon,
        open_page(browser, daemon) as session,
    ):
        session.page.locator("tbody").first.wait_for()
        _save(session, "no-agents")
        driver.hang("nvmlDeviceGetCount_v2", seconds=120)
        driver.write()
        session.shows("values are 1 reading old")
        _save(session, "stale")
        session.shows("values are hidden")
        session.page.wait_for_timeout(5000)
        _save(session, "driver-hung")


def _no_driver(browser: Browser, root: Path) -> None:
    with _daemon(root / "none", "--source", "nvml") as daemon, open_page(browser, daemon) as session:
        session.shows("No GPU can be read")
        _save(session, "no-gpu", whole=False)


@contextmanager
def _daemon(directory: Path, *options: str, **fields: Any) -> Iterator[RunningDaemon]:
    with RunningDaemon(directory, *options, **fields) as daemon:
        yield daemon


def _open_first(session: PageSession) -> None:
    session.page.locator("tbody .of-program button").first.click()
    session.page.locator("tbody svg").wait_for()
    session.page.mouse.move(0, 0)
    session.page.wait_for_timeout(1000)


def _cached(daemon: RunningDaemon, workload: str) -> int:
    return int(
        sum(process["cached_bytes"] or 0 for process in daemon.get("processes") if process["workload"] == workload)
    )


def _save(session: PageSession, name: str, whole: bool = True) -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    if not whole:
        session.page.set_viewport_size({**WIDE, "height": 620})
    path = IMAGES / f"page-{name}.png"
    drawn = Image.open(BytesIO(session.page.screenshot(full_page=whole)))
    few = drawn.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(path, optimize=True)
    assert path.stat().st_size <= MAX_BYTES, f"{path} has {path.stat().st_size} bytes"


if __name__ == "__main__":
    main()
