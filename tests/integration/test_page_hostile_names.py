"""The page with hostile names of programs and devices."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from gpumond.sim.device import DeviceSpec, create
from tests.helpers.agents import GIB
from tests.helpers.browser import PHONE, needs_chromium, open_page
from tests.helpers.running import RunningDaemon
from tests.integration.hostile import COMM, LONG, NAME, holding

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [needs_chromium, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    """Daemon on a simulated device whose name is hostile, as are those of the program that uses it."""
    directory = tmp_path_factory.mktemp("hostile")
    create(directory / "cards" / "card0", DeviceSpec("GPU-hostile", 0, NAME, 24 * GIB))
    environ = {"GPUMOND_SIM_DIR": str(directory / "cards")}
    daemon = RunningDaemon(directory / "daemon", "--source", "sim", environ=environ)
    with daemon, holding(directory / "cards" / "card0"):
        yield daemon


def add_hostile_text(frame: Any) -> None:
    """Add text that no daemon would send."""
    (device,) = frame["snapshot"]["devices"]
    device["name"] = LONG
    for process in frame["processes"]:
        process.update(comm=LONG, user=LONG, pod_name=LONG, state=LONG)
    frame["verdicts"] = [{"device_uuid": LONG, "pid": 1, "kind": LONG, "since": 1.0, "summary": LONG}]
    labels = [["severity", LONG]]
    alert = {"rule": LONG, "phase": "firing", "labels": labels, "annotations": [["summary", LONG]], "active_at": 1.0}
    frame["alerts"] = [{**alert, "silenced_by": []}]
    frame["faults"] = [{"source": LONG, "kind": LONG, "device_uuid": None, "detail": LONG, "remedy": LONG}]


@pytest.mark.parametrize("rewrite", [None, add_hostile_text], ids=["cleaned", "worse"])
@pytest.mark.parametrize("viewport", [None, PHONE], ids=["wide", "phone"])
def test_hostile_names_are_text_and_nothing_else(
    browser: Browser, card: RunningDaemon, viewport: Any, rewrite: Callable[[Any], None] | None
):
    with open_page(browser, card, viewport, rewrite) as session:
        session.page.locator("tbody .of-program button").first.click()
        session.page.locator("tbody svg").wait_for()
        (device,), (program,) = session.texts("#hero-title bdi", "tbody .of-program bdi")
        assert device.startswith("<img src=x onerror=window.pwned=1><script>")
        hostile = LONG[:79] if rewrite else COMM
        shown = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in hostile)
        assert program == (f"{shown}…" if rewrite else shown)
        document = session.page.evaluate("document.documentElement.outerHTML")
        assert not re.findall("[\x00-\x08\x1b\u200e\u200f\u202a-\u202e\u2066-\u2069]", document)
        assert "W" * 1001 not in document
        assert session.page.evaluate("[document.images.length, document.scripts.length, typeof window.pwned]") == [
            0,
            2,
            "undefined",
        ]
        assert session.fits()
