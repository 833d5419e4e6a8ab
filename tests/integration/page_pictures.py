"""Update docs/images/page-*.png: ``python -m tests.integration.page_pictures``.

The light one shows what a daemon on an H200 (driver 580.159.04) answered on 2026-11-28: the programs of
`tests/gpu/test_growth.py`, of which two keep memory, a Llama that a Trainer trains and evaluates, a generation server,
tables in an RMM pool, and an idle program. The others are of the demo.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
import time
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from tests.helpers.agents import GIB
from tests.helpers.browser import PROGRAMS, PageSession, chromium, open_page, ready, sign_in
from tests.helpers.running import RunningDaemon, until
from tests.integration.page_tasks import cached

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Route

IMAGES = Path(__file__).parents[2] / "docs" / "images"
ANSWERS = Path(__file__).parents[1] / "fixtures" / "page_card.json.gz"
"""The time, the stream of ten seconds, and the shares of 15 minutes."""
MAX_BYTES = 200_000
SIZE = {"width": 1440, "height": 990}
SECONDS = 75
"""Time after the leak is found, so the pictures have a past."""


def main() -> None:
    os.environ["NODE_NAME"] = "gpu-01"
    with (
        tempfile.TemporaryDirectory(prefix="gpumond-pictures-") as directory,
        RunningDaemon(Path(directory), "--interval", "0.2s", "--devices", "1", command="demo") as demo,
        chromium() as browser,
    ):
        ready(demo, PROGRAMS)
        until(lambda: any(alert["rule"] == "leak" for alert in demo.get("alerts")), 240)
        _save_card(browser, demo)
        time.sleep(SECONDS)
        with open_page(browser, demo, SIZE, color_scheme="dark") as session:
            session.shows_content()
            _save(session, "dark")
        with open_page(browser, demo, SIZE) as session:
            until(lambda: cached(demo, "train-llm") > 2 * GIB, 120)
            session.page.get_by_role("button", name="Flush train-llm…").click()
            sign_in(session, demo)
            session.page.get_by_role("button", name="Flush now").click()
            session.shows(" released.")
            _save(session, "receipt")


def _save_card(browser: Browser, daemon: RunningDaemon) -> None:
    """Save a picture of the page with the answers of the daemon on the card."""
    answers = json.loads(gzip.decompress(ANSWERS.read_bytes()))

    def answer(route: Route) -> None:
        if "/live" in route.request.url:
            route.fulfill(content_type="text/event-stream", body=answers["live"])
        else:
            shares = "/shares" in route.request.url
            route.fulfill(content_type="application/json", body=answers["shares"] if shares else '{"points": []}')

    with open_page(browser, daemon, SIZE, guard=answer, color_scheme="light") as session:
        session.page.clock.install(time=answers["time"])
        session.page.reload()
        session.page.clock.run_for(3000)
        session.shows_content()
        _save(session, "light")


def _save(session: PageSession, name: str) -> None:
    session.page.mouse.move(0, 0)
    session.page.wait_for_timeout(2000)
    path = IMAGES / f"page-{name}.png"
    drawn = Image.open(BytesIO(session.page.screenshot()))
    few = drawn.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(path, optimize=True)
    assert path.stat().st_size <= MAX_BYTES, f"{path} has {path.stat().st_size} bytes"


if __name__ == "__main__":
    main()
