"""The dashboards drawn in Chromium with Grafana's own components, from the answers of a real Prometheus.

python -m tests.grafana.drawn [BOARD…] updates docs/images/grafana-*.png.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.grafana.boards import BOARDS, NAMES, opened
from tests.grafana.session import Session, running
from tests.helpers.browser import MISSING, NETWORK, chromium
from tests.helpers.prometheus import fill

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpumond" / "grafana"
"""A copy of tests/grafana/drawing/package.json, and `npm install --prefix` there: see .ci/run."""

PROGRAM = Path(__file__).with_name("drawing")
ESBUILD = CACHE / "node_modules" / ".bin" / "esbuild"
ICONS = CACHE / "node_modules" / "@grafana" / "ui" / "dist"
ORIGIN = "http://drawing.invalid/"
"""Address of the drawing program in the browser; requests to it are served from files."""
OPTIONS = (
    "--bundle",
    "--jsx=automatic",
    "--format=iife",
    "--log-level=error",
    '--define:process.env.NODE_ENV="production"',
    "--loader:.svg=empty",
    "--loader:.ttf=empty",
)
ABSENT = [
    *MISSING,
    *([] if ESBUILD.exists() and shutil.which("node") else [f"node, and Grafana's packages in {CACHE}"]),
]
needs_drawer = pytest.mark.skipif(bool(ABSENT), reason=f"needs {' and '.join(ABSENT)}")

LEFT = ("state-timeline",)
"""Kinds of panels for which Grafana publishes no component."""

UNKNOWN = "unknown"
"""Text of a panel without a value."""

SIZE = {"width": 1600, "height": 900}
SETTLED = """() => [...document.querySelectorAll('[data-panel]')].every(panel => panel.querySelector('[data-state]'))
    && document.querySelector('#board') !== null"""
STATES = """() => [...document.querySelectorAll('[data-panel]')].map(panel => {
    const inside = panel.querySelector('[data-state]');
    const colored = canvas => {
        const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
        return data.some((part, at) => at % 4 === 3 && part > 0);
    };
    const canvas = inside.querySelector('canvas');
    return { title: panel.dataset.panel, state: inside.dataset.state, text: inside.innerText.trim(),
             painted: canvas ? colored(canvas) : null, rows: inside.querySelectorAll('[role=row]').length,
             kind: panel.dataset.kind };
})"""


@dataclass(frozen=True)
class Drawing:
    """Results of each panel by title, and the errors in the console."""

    panels: Sequence[Mapping[str, Any]]
    complaints: Sequence[str]

    def of(self, state: str) -> set[str]:
        return {panel["title"] for panel in self.panels if panel["state"] == state}

    @property
    def filled(self) -> set[str]:
        """Return the panels that show data."""
        return {panel["title"] for panel in self.panels if panel["state"] == "drawn" and _is_filled(panel)}


def _is_filled(panel: Mapping[str, Any]) -> bool:
    if panel["kind"] == "timeseries":
        return bool(panel["painted"])
    if panel["kind"] == "table":
        return int(panel["rows"]) > 1
    return panel["text"] not in ("", UNKNOWN)


class Drawer:
    def __init__(self, browser: Browser, directory: Path) -> None:
        _build(directory)
        self._complaints: list[str] = []
        self.page: Page = browser.new_page(viewport=SIZE)
        self.page.on("pageerror", lambda error: self._complaints.append(str(error)))
        self.page.on("console", self._logged)
        self.page.route("**/*", partial(_serve, directory))
        self.page.goto(f"{ORIGIN}index.html")

    def _logged(self, message: Any) -> None:
        if message.type == "error" and not message.text.startswith(NETWORK):  # no package contains Grafana's own font
            self._complaints.append(message.text)

    def draw(self, drawing_input: Mapping[str, Any]) -> Drawing:
        self._complaints.clear()
        self.page.evaluate("drawing_input => window.draw(drawing_input)", drawing_input)
        self.page.wait_for_function(SETTLED)
        height = self.page.evaluate("document.querySelector('#board').getBoundingClientRect().bottom")
        self.page.set_viewport_size({**SIZE, "height": int(height) + 8})  # panels outside the window are not drawn
        self.page.wait_for_timeout(300)  # curves are drawn a little later
        return Drawing(self.page.evaluate(STATES), tuple(self._complaints))


def _serve(directory: Path, route: Route) -> None:
    """Serve the program, and Grafana's icons, which are among its built files and in the package."""
    path = route.request.url.removeprefix(ORIGIN)
    icon = path.removeprefix("public/build/")
    file = ICONS / "public" / icon if icon != path else directory / path
    if file.is_file():
        route.fulfill(path=file)
    else:
        route.fulfill(status=404)


def _build(directory: Path) -> None:
    shutil.copy(PROGRAM / "index.html", directory)
    command = [ESBUILD, PROGRAM / "drawing.jsx", *OPTIONS, f"--outfile={directory / 'drawing.js'}"]
    environ = {**os.environ, "NODE_PATH": str(CACHE / "node_modules")}
    built = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=110)
    assert built.returncode == 0, built.stderr


@contextmanager
def drawer(directory: Path) -> Iterator[Drawer]:
    with chromium() as browser:
        yield Drawer(browser, directory)


def drawing_input(
    name: str, session: Session, chosen: dict[str, Sequence[str]], mode: str = "dark", folded: bool = False
) -> dict[str, Any]:
    """Return the drawing program's input. All queries have one time, because Grafana merges tables by it.

    ``folded``: collapsed rows are not opened.
    """
    now = time.time()
    panels = [*_folded(BOARDS[name])] if folded else opened(BOARDS[name])
    return {
        "board": {**BOARDS[name], "panels": panels},
        "answers": answers(panels, session, chosen, now),
        "chosen": chosen,
        "from": session.prometheus.since,
        "to": now,
        "mode": mode,
    }


def _folded(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the panels outside of collapsed rows, at the places where Grafana draws them."""
    hidden = 0
    for panel in board["panels"]:
        place = panel["gridPos"]
        yield {**panel, "gridPos": {**place, "y": place["y"] - hidden}}
        if inner := [each["gridPos"] for each in panel.get("panels", ())]:
            hidden += max(each["y"] + each["h"] for each in inner) - place["y"] - place["h"]


def answers(
    panels: Sequence[dict[str, Any]], session: Session, chosen: Any, now: float
) -> dict[str, list[dict[str, Any]]]:
    """Return the query results of each panel by its id, in the drawing program's format."""
    found = {}
    for panel in panels:
        found[str(panel["id"])] = [
            {"refId": target["refId"], "series": _series(session, fill(target["expr"], chosen), target, now)}
            for target in panel.get("targets", ())
        ]
    return found


def _series(session: Session, expression: str, target: Any, now: float) -> list[dict[str, Any]]:
    prometheus = session.prometheus
    found = prometheus.instant(expression, now) if target["instant"] else prometheus.over_time(expression, now)
    return [
        {
            "metric": one["metric"],
            "name": _named(target.get("legendFormat", ""), one["metric"]),
            "points": one["values"] if "values" in one else [one["value"]],
        }
        for one in found
    ]


def _named(legend: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"{{ *(\w+) *}}", lambda label: labels.get(label[1], ""), legend) or "Value"


IMAGES = Path(__file__).parents[2] / "docs" / "images"
WATCHED_SECONDS = 120
SHOWN = {"device": {"machine": "demo"}, "workload": {"workload": "notebook"}}
"""Selected values in the images, where there are several."""


def main() -> None:
    from PIL import Image

    from tests.fakenvml import build

    wanted = sys.argv[1:] or NAMES
    with tempfile.TemporaryDirectory(prefix="gpumond-grafana-") as made:
        directory = Path(made)
        (directory / "drawing").mkdir()
        with running(directory, build(directory)) as session, drawer(directory / "drawing") as drawn_with:
            time.sleep(WATCHED_SECONDS / 2)
            session.demo.flush(target={"workload": SHOWN["workload"]["workload"]})  # its panels about flushes have data
            time.sleep(WATCHED_SECONDS / 2)
            for name in wanted:
                combinations = session.combinations(name)
                demo = session.demo.url.removeprefix("http://")
                shown = {key: demo if value == "demo" else value for key, value in SHOWN.get(name, {}).items()}
                chosen = next(c for c in combinations if all(value in c[key] for key, value in shown.items()))
                drawing = drawn_with.draw(drawing_input(name, session, chosen, folded=True))
                path = IMAGES / f"grafana-{name}.png"
                drawn_with.page.locator("#board").screenshot(path=path)
                few = Image.open(path).convert("RGB").quantize(256, dither=Image.Dither.NONE)
                few.save(path, optimize=True)
                print(path.name, path.stat().st_size, sorted(drawing.of("empty")), drawing.complaints)  # noqa: T201


if __name__ == "__main__":
    main()
