"""The dashboards checked against Grafana's own types by the TypeScript compiler."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.grafana.boards import BOARDS, opened
from tests.grafana.drawn import CACHE

PREAMBLE = """\
import type { Dashboard, Panel, GraphFieldConfig, VizLegendOptions, VizTooltipOptions } from "@grafana/schema";

// JSON has an enum's values, not its names.
type Plain<T> = T extends string ? `${T}` :
  T extends number | boolean | null | undefined ? T :
  T extends unknown ? { [K in keyof T]: Plain<T[K]> } : never;
type Curves = Plain<Omit<Panel<{}, GraphFieldConfig>, "options">> &
  { options: Plain<{ legend: VizLegendOptions; tooltip: VizTooltipOptions }> };
"""
MARKS = ("expr", "step", "titleFormat", "textFormat", "useValueForTime")
"""Parts that the schema leaves to the data source."""
IMPORT = ("__inputs", "__requires", "__elements")
"""Parts that Grafana reads at an import, and that the schema does not contain."""


def source() -> str:
    """Write the dashboard as literals, so that the compiler refuses keys that the schema does not know."""
    lines = [PREAMBLE]
    for name, board in BOARDS.items():
        board = without(board, IMPORT)
        annotations = {"list": [without(query, MARKS) for query in board["annotations"].get("list", [])]}
        lines.append(f"export const {name}: Plain<Dashboard> = {json.dumps({**board, 'annotations': annotations})};")
        curves = [panel for panel in opened(board) if panel["type"] == "timeseries"]
        lines.append(f"export const {name}Curves: Curves[] = {json.dumps(curves)};")
    return "\n".join(lines)


def without(part: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for key, value in part.items() if key not in keys}


def compile(directory: Path, text: str) -> subprocess.CompletedProcess[str]:
    (directory / "boards.ts").write_text(text)
    (directory / "node_modules").symlink_to(CACHE / "node_modules")
    options = ["--noEmit", "--strict", "--skipLibCheck", "--module", "nodenext", "--moduleResolution", "nodenext"]
    command = ["node", str(CACHE / "node_modules/typescript/bin/tsc"), *options, "boards.ts"]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=110)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    if shutil.which("node") is None or not (CACHE / "node_modules/@grafana/schema").is_dir():
        pytest.skip(f"needs node, and typescript and @grafana/schema in {CACHE} (see CACHE)")
    return tmp_path


def test_dashboards_have_grafanas_types(directory: Path):
    done = compile(directory, source())
    assert done.returncode == 0, done.stdout


def test_schema_rejects_other_types(directory: Path):
    wrong = source().replace('"displayMode": "table"', '"displayMode": "tabel"').replace('"gridPos"', '"gridPose"')
    done = compile(directory, wrong)
    assert done.returncode != 0
    assert "tabel" in done.stdout
    assert "gridPose" in done.stdout
