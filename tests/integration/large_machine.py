"""Machine with many devices and processes on the page."""

from __future__ import annotations

from functools import cache
from typing import Any

from tests.helpers.agents import GIB
from tests.helpers.browser import PageSession, show_frame
from tests.helpers.frames import make_frame
from tests.helpers.values import make_device, make_pool, make_process, make_report

NODES = """() => {
    const all = document.createNodeIterator(document, NodeFilter.SHOW_ALL);
    let count = 0;
    while (all.nextNode()) count++;
    return count;
}"""


@cache
def machine(devices: int, processes: int) -> dict[str, Any]:
    """Return a frame: each process has an agent, belongs to one of four users, and uses at least 1 GiB."""
    pids = {index: range(1 + index * processes, 1 + (index + 1) * processes) for index in range(devices)}
    readings = [
        make_device(
            f"GPU-{index}",
            index=index,
            name="NVIDIA H100 80GB HBM3",
            used_bytes=sum(_used(pid) for pid in own),
            processes=tuple(make_process(pid, _used(pid), comm="python3", user=f"user{pid % 4}") for pid in own),
        )
        for index, own in pids.items()
    ]
    reports = tuple(
        make_report(pid, (make_pool(f"GPU-{index}", live=GIB // 2, cached=GIB // 4),), workload=f"w{pid % 8}")
        for index, own in pids.items()
        for pid in own
    )
    return make_frame(*readings, reports=reports, seq=7)


def _used(pid: int) -> int:
    return GIB + (pid << 12)


def show(session: PageSession, frame: dict[str, Any]) -> None:
    """Make the page show a frame, and pause it."""
    show_frame(session, frame)
    session.page.keyboard.press("p")
    session.page.get_by_role("button", name="Resume").wait_for()
