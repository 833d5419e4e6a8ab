"""The page in Chromium: time to the first frame, DOM nodes, and time of a sort and a filter, by size of the machine.

python -m bench.page [--save]

The frames are those of `bench.live`. A sort or a filter is measured until the layout of the page is complete. The
processor is shared between the browser, the daemon and this script.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from bench.live import SIZES, Machine
from bench.result import publish
from gpumond.api.live import WHOLE
from gpumond.api.page import PAGE
from tests.integration.browser import PROGRAMS, PageSession, chromium, open_page, ready, show_frame
from tests.integration.test_page_many import NODES
from tests.running import RunningDaemon

RUNS = 25
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
        daemon = RunningDaemon(Path(directory) / "demo", verb="demo")
        try:
            ready(daemon, PROGRAMS)
            with open_page(browser, daemon) as session:
                found = {f"{devices} x {each}": measure(session, devices, each) for devices, each in SIZES}
        finally:
            daemon.stop()
    compressed = sum(len(file.compressed) for file in PAGE.values())
    publish("page", {"compressed_bytes": compressed, "files": len(PAGE), **found})


if __name__ == "__main__":
    main()
