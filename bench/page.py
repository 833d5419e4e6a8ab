"""The page in Chromium: time to the first frame, DOM nodes, and time of a sort and a filter, by size of the machine.

python -m bench.page [--save]

The first visitor is that of a daemon which has answered only requests for metrics and probes, with 1 device and 4
programs; the time is from the navigation until the first frame is drawn. The other frames are those of `bench.live`. A
sort or a filter is measured until the layout of the page is complete. The processor is shared between the browser, the
daemon and this script.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.live import SIZES, Machine
from bench.result import publish
from gpumond.api.live_frames import WHOLE
from gpumond.api.page import PAGE
from tests.integration.browser import PROGRAMS, PageSession, chromium, open_page, ready, show_frame
from tests.integration.test_page_many import NODES
from tests.running import RunningDaemon, until

if TYPE_CHECKING:
    from playwright.sync_api import Browser

RUNS, VISITS = 25, 5
DRAWN = """new MutationObserver((_, observer) => {
    window.drawnAt = performance.now();
    observer.disconnect();
}).observe(document, { subtree: true, attributeFilter: ['data-seq'] })"""
TIMES = """runs => {
    const times = act => Array.from({ length: runs }, (_, run) => {
        const began = performance.now();
        act(run);
        document.body.offsetHeight;
        return performance.now() - began;
    });
    const heads = [...document.querySelectorAll('#columns button')];
    const filter = document.querySelector('#filter');
    const sorts = times(run => heads[run % heads.length].click());
    const filters = times(run => {
        filter.value = run % 2 ? 'w3' : '';
        filter.dispatchEvent(new Event('input'));
    });
    return [sorts, filters];
}"""


def visit(browser: Browser, place: Path) -> float:
    """Open the page of a new daemon."""
    daemon = RunningDaemon(place, verb="demo")
    try:
        until(lambda: sum(count for (name, _), count in daemon.series().items() if name == "gpumond_agents") == 4)
        page = browser.new_page()
        page.add_init_script(DRAWN)
        page.goto(daemon.url)
        page.wait_for_function("() => window.drawnAt")
        drawn = float(page.evaluate("window.drawnAt"))
        page.close()
        return drawn
    finally:
        daemon.stop()


def measure(session: PageSession, devices: int, processes: int) -> dict[str, Any]:
    machine = Machine(devices, processes, 0.1)
    machine.next()
    frame = json.loads(WHOLE.dump_json(machine.next()))
    show_frame(session, frame)
    page = session.page
    first = page.evaluate("performance.now()")
    page.keyboard.press("Space")
    page.wait_for_timeout(1000)
    sorts, filters = page.evaluate(TIMES, RUNS)
    return {
        "first_frame_milliseconds_at_most": round(first),
        "dom_nodes": page.evaluate(NODES),
        "rows_in_the_document": page.locator("tbody.process").count(),
        "sort_milliseconds": round(median(sorts), 1),
        "filter_milliseconds": round(median(filters), 1),
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as directory, chromium() as browser:
        first = [visit(browser, Path(directory) / str(number)) for number in range(VISITS)]
        daemon = RunningDaemon(Path(directory) / "demo", verb="demo")
        try:
            ready(daemon, PROGRAMS)
            with open_page(browser, daemon) as session:
                found = {f"{devices} x {each}": measure(session, devices, each) for devices, each in SIZES}
        finally:
            daemon.stop()
    compressed = sum(len(file.compressed) for file in PAGE.values())
    visits = {"milliseconds": [round(each) for each in first], "median_milliseconds": round(median(first))}
    publish("page", {"compressed_bytes": compressed, "files": len(PAGE), "first_visitor": visits, **found})


if __name__ == "__main__":
    main()
