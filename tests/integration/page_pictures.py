"""Update docs/images/page-*.png from the demo: ``python -m tests.integration.page_pictures``."""

from __future__ import annotations

import os
import tempfile
import time
from io import BytesIO
from pathlib import Path

from PIL import Image

from tests.helpers.agents import GIB
from tests.helpers.browser import PROGRAMS, PageSession, chromium, open_page, ready, sign_in
from tests.helpers.running import RunningDaemon, until
from tests.integration.page_tasks import cached

IMAGES = Path(__file__).parents[2] / "docs" / "images"
MAX_BYTES = 200_000
SIZE = {"width": 1440, "height": 990}
SECONDS = 75
"""Time after the leak is found, so that the pictures have a past."""


def main() -> None:
    os.environ["NODE_NAME"] = "gpu-01"
    with (
        tempfile.TemporaryDirectory(prefix="gpumond-pictures-") as directory,
        RunningDaemon(Path(directory), "--interval", "0.2", "--devices", "2", command="demo") as demo,
        chromium() as browser,
    ):
        ready(demo, PROGRAMS)
        until(lambda: any(alert["rule"] == "leak" for alert in demo.get("alerts")), 240)
        time.sleep(SECONDS)
        for scheme in ("light", "dark"):
            with open_page(browser, demo, SIZE, color_scheme=scheme) as session:
                session.shows_content()
                _save(session, scheme)
        with open_page(browser, demo, SIZE) as session:
            until(lambda: cached(demo, "train-llm") > 2 * GIB, 120)
            session.page.get_by_role("button", name="Flush train-llm…").click()
            sign_in(session, demo)
            session.page.get_by_role("button", name="Flush now").click()
            session.shows(" released.")
            _save(session, "receipt")


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
