"""The page in Chromium: first frame, CPU time, DOM nodes, sort and filter, by size of the machine.

python -m bench.page [--save]

The first visitor is that of a daemon which has answered only requests for metrics and probes, with 1 device and 4
programs; the time is from the navigation until the first frame is drawn. The other frames are those of `bench.live`,
which `bench.generated_daemon` sends once a second. A sort or a filter is measured until the layout of the page is
complete. CPU time is that of the tasks of the tab's main thread. The processor is shared between the browser, the
daemon and this script.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.live import SIZES
from bench.result import publish
from gpumond.page.files import PAGE
from tests.helpers.browser import chromium
from tests.helpers.running import RunningDaemon, free_port, until
from tests.integration.large_machine import NODES

if TYPE_CHECKING:
    from playwright.sync_api import Browser, CDPSession, Page

ROOT = Path(__file__).resolve().parents[1]
RUNS, VISITS, SECONDS = 25, 5, 20
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
    daemon = RunningDaemon(place, command="demo")
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


def measure(browser: Browser, devices: int, processes: int) -> dict[str, Any]:
    """Open the page of a generated machine several times, and observe the last tab."""
    port = free_port()
    command = [sys.executable, "-m", "bench.generated_daemon", str(port), str(devices), str(processes)]
    server = subprocess.Popen(command, cwd=ROOT)
    try:
        until(lambda: listening(port))
        visits = []
        for _ in range(VISITS):
            page = browser.new_page()
            page.add_init_script(DRAWN)
            page.goto(f"http://127.0.0.1:{port}")
            page.wait_for_function("() => window.drawnAt")
            visits.append(float(page.evaluate("window.drawnAt")))
            if len(visits) < VISITS:
                page.close()
        return {"first_frame_milliseconds": round(median(visits)), **steady(page), **used(page)}
    finally:
        server.terminate()
        server.wait()


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def steady(page: Page) -> dict[str, Any]:
    """Observe a tab that only receives frames."""
    tools = page.context.new_cdp_session(page)
    tools.send("Performance.enable")
    page.wait_for_timeout(2000)
    before = busy_seconds(tools)
    page.wait_for_timeout(1000 * SECONDS)
    return {"cpu_percent": round(100 * (busy_seconds(tools) - before) / SECONDS, 1)}


def busy_seconds(tools: CDPSession) -> float:
    metrics = {each["name"]: each["value"] for each in tools.send("Performance.getMetrics")["metrics"]}
    return float(metrics["TaskDuration"])


def used(page: Page) -> dict[str, Any]:
    """Sort and filter a table that is paused."""
    page.keyboard.press("Space")
    page.wait_for_timeout(1000)
    sorts, filters = page.evaluate(TIMES, RUNS)
    return {
        "dom_nodes": page.evaluate(NODES),
        "rows_in_the_document": page.locator("tbody.process").count(),
        "sort_milliseconds": round(median(sorts), 1),
        "filter_milliseconds": round(median(filters), 1),
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as directory, chromium() as browser:
        first = [visit(browser, Path(directory) / str(number)) for number in range(VISITS)]
        found = {f"{devices} x {each}": measure(browser, devices, each) for devices, each in SIZES}
    compressed = sum(len(file.compressed) for file in PAGE.values())
    visits = {"milliseconds": [round(each) for each in first], "median_milliseconds": round(median(first))}
    publish("page", {"compressed_bytes": compressed, "files": len(PAGE), "first_visitor": visits, **found})


if __name__ == "__main__":
    main()
