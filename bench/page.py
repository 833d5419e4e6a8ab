"""The page in Chromium: first frame, long tasks, CPU time, sort and filter of the largest machine.

python -m bench.page [--all] [--save]

With --all or --save, which take ten minutes, also of smaller machines, of a first visitor, and a user's tasks.

The first visitor is that of a daemon which has answered only requests for metrics and probes, with 1 device and 4
programs; the time is from the navigation until the first frame is drawn. The other frames are those of `bench.live`,
which `bench.generated_daemon` sends once a second. A sort or a filter is measured until the layout of the page is
complete. CPU time is that of the tab's renderer process, with all of its threads. A long task takes more than 50 ms of
the tab's main thread. The processor is shared between the browser, the daemon and this script.

The tasks are those of `tests.integration.page_tasks`, on the demo or on 3200 processes. Their seconds are those from
the first input until the page shows the result, without the time in which a person thinks. `bounds` are the aims for
the largest machine.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, get_args

from bench.live import SIZES
from bench.result import publish
from gpumond.features.flush.flusher import MANUAL_COOLDOWN_SECONDS
from gpumond.page.files import PAGE
from tests.helpers.agents import GIB
from tests.helpers.browser import PROGRAMS, PageSession, chromium, open_page, put_rule, ready, signed_in
from tests.helpers.running import RunningDaemon, free_port, until
from tests.integration.large_machine import NODES, machine, show
from tests.integration.page_tasks import (
    COMPARE,
    EXPORT,
    LINK,
    MINUTE,
    WASTE,
    Input,
    Task,
    cached,
    finding,
    flushing,
    silencing,
)

if TYPE_CHECKING:
    from playwright.sync_api import Browser, CDPSession, Page

ROOT = Path(__file__).resolve().parents[1]
RUNS, FIRST_VISITS, VISITS, SECONDS = 25, 5, 9, 30
BOUNDS = {"first_frame_milliseconds": 300, "long_tasks": 0, "cpu_percent": 3.0}
FIRST_DRAW = """window.drawn = new Promise(resolve => new MutationObserver((_, observer) => {
    resolve(performance.now());
    observer.disconnect();
}).observe(document, { subtree: true, attributeFilter: ['data-seq'] }))"""
"""The time of the first frame. To wait for it costs the tab nothing, unlike a condition, which is evaluated 60 times a
second."""
LONG_TASKS = """window.longTasks = [];
new PerformanceObserver(list => window.longTasks.push(...list.getEntries().map(entry => entry.duration)))
    .observe({ type: 'longtask' })"""
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
        page.add_init_script(FIRST_DRAW)
        page.goto(daemon.url)
        drawn = float(page.evaluate("window.drawn"))
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
        until(lambda: is_listening(port))
        visits = []
        for _ in range(VISITS):
            page = browser.new_page()
            page.add_init_script(FIRST_DRAW)
            page.goto(f"http://127.0.0.1:{port}")
            visits.append(float(page.evaluate("window.drawn")))
            if len(visits) < VISITS:
                page.close()
        found = {"first_frame_milliseconds": round(median(visits)), **steady(browser, page), **sort_and_filter(page)}
        page.close()  # another tab would be measured with the next one
        return found
    finally:
        server.terminate()
        server.wait()


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def steady(browser: Browser, page: Page) -> dict[str, Any]:
    """Observe a tab that only receives frames."""
    page.wait_for_timeout(2000)
    page.evaluate(LONG_TASKS)
    tools = browser.new_browser_cdp_session()
    before = renderer_seconds(tools)
    page.wait_for_timeout(1000 * SECONDS)
    cpu = (renderer_seconds(tools) - before) / SECONDS
    longs = page.evaluate("window.longTasks")
    return {
        "long_tasks": len(longs),
        "longest_task_milliseconds": round(max(longs, default=0)),
        "cpu_percent": round(100 * cpu, 1),
    }


def renderer_seconds(tools: CDPSession) -> float:
    """Return the CPU time of all renderers; only one of them has a page that does anything."""
    processes = tools.send("SystemInfo.getProcessInfo")["processInfo"]
    return sum(float(each["cpuTime"]) for each in processes if each["type"] == "renderer")


def sort_and_filter(page: Page) -> dict[str, Any]:
    """Sort and filter a table that is paused."""
    page.keyboard.press("p")
    page.wait_for_timeout(1000)
    sorts, filters = page.evaluate(TIMES, RUNS)
    return {
        "dom_nodes": page.evaluate(NODES),
        "rows_in_the_document": page.locator("tbody.process").count(),
        "sort_milliseconds": round(median(sorts), 1),
        "filter_milliseconds": round(median(filters), 1),
    }


def tasks(browser: Browser, place: Path) -> dict[str, dict[str, float]]:
    """Return the seconds of each task, by mouse and by keyboard."""
    found: dict[str, dict[str, float]] = {}
    with RunningDaemon(place, "--interval", "0.5s", command="demo") as demo:
        ready(demo, PROGRAMS)
        for by in get_args(Input):
            put_rule(demo, name=f"{by}-rule")
            with signed_in(browser, demo) as session:
                session.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
                session.page.locator(".card", has_text=f"{by}-rule").wait_for()
                until(lambda: cached(demo, "train-llm") > GIB // 2 and is_cooled_down(demo, "train-llm"), 120)
                for task in (WASTE, flushing("train-llm"), silencing(f"{by}-rule"), MINUTE, LINK, EXPORT, COMPARE):
                    found.setdefault(task.name, {})[by] = task_seconds(task, session, by)
                    session.page.reload()
                    session.shows_content()
            with open_page(browser, demo) as session:
                show(session, machine(64, 50))
                task = finding("3077")
                found.setdefault(task.name, {})[by] = task_seconds(task, session, by)
    return found


def is_cooled_down(demo: RunningDaemon, workload: str) -> bool:
    """Return True if the cooldown after the last flush of a program is over."""
    flushes = [each for each in demo.get("receipts") if each["workload"] == workload and each["outcome"] != "planned"]
    ends = [each["started_at"] + each["duration_seconds"] for each in flushes]
    return time.time() - max(ends, default=0.0) > MANUAL_COOLDOWN_SECONDS + 1


def task_seconds(task: Task, session: PageSession, by: Input) -> float:
    began = time.monotonic()
    task.run(session, by)
    return round(time.monotonic() - began, 2)


def main() -> None:
    whole = not {"--all", "--save"}.isdisjoint(sys.argv)
    with tempfile.TemporaryDirectory() as directory, chromium() as browser:
        sizes = SIZES if whole else SIZES[-1:]
        found: dict[str, Any] = {f"{devices} x {each}": measure(browser, devices, each) for devices, each in sizes}
        if whole:
            first = [visit(browser, Path(directory) / str(number)) for number in range(FIRST_VISITS)]
            visits = {"milliseconds": [round(each) for each in first], "median_milliseconds": round(median(first))}
            found |= {"first_visitor": visits, "tasks": tasks(browser, Path(directory) / "tasks")}
    sent = [file for path, file in PAGE.items() if not path.startswith(("/lazyviews", "/forms"))]
    compressed = sum(len(file.compressed) for file in sent)
    publish("page", {"compressed_bytes": compressed, "files": len(sent), "bounds": BOUNDS, **found})


if __name__ == "__main__":
    main()
