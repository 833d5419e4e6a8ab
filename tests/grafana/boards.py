"""The dashboards of the repository."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
DIRECTORY = ROOT / "grafana" / "dashboards"
NAMES = ("fleet", "device", "workload", "job", "daemon")

BOARDS: dict[str, dict[str, Any]] = {name: json.loads((DIRECTORY / f"{name}.json").read_text()) for name in NAMES}


class Target(NamedTuple):
    """Query of a panel or, with an empty ``panel``, of annotations."""

    board: str
    panel: str
    expression: str
    legend: str
    instant: bool

    def __str__(self) -> str:
        return f"{self.board} / {self.panel} / {self.legend or self.expression[:40]}"


def opened(board: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows and panels, with those in collapsed rows."""
    return [each for panel in board["panels"] for each in (panel, *panel.get("panels", ()))]


def panels() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each panel, rows excluded, with the name of its dashboard."""
    for name, board in BOARDS.items():
        for panel in opened(board):
            if panel["type"] != "row":
                yield name, panel


def targets() -> Iterator[Target]:
    for name, panel in panels():
        for target in panel["targets"]:
            yield Target(name, panel["title"], target["expr"], target.get("legendFormat", ""), target["instant"])


def marks() -> Iterator[Target]:
    for name, board in BOARDS.items():
        for query in board["annotations"].get("list", []):
            yield Target(name, f"marks: {query['name']}", query["expr"], "", False)


def variables(board: str) -> list[dict[str, Any]]:
    return [variable for variable in BOARDS[board]["templating"]["list"] if variable["type"] == "query"]
