"""The dashboards checked against Grafana's own types by the TypeScript compiler."""

from __future__ import annotations

import json
import subprocess
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
    """Write the dashboard as literals, so the compiler refuses keys that the schema does not know."""
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


pytestmark = [
    pytest.mark.needs("node"),
    pytest.mark.skipif(
        not (CACHE / "node_modules/@grafana/schema").is_dir(),
        reason=f"needs typescript and @grafana/schema in {CACHE} (see CACHE)",
    ),
]


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The compiler's messages about the dashboards and about wrong ones, which are compiled at once."""
    directory = tmp_path_factory.mktemp("schema")
    wrong = source().replace('"displayMode": "table"', '"displayMode": "tabel"').replace('"gridPos"', '"gridPose"')
    (directory / "boards.ts").write_text(source())
    (directory / "wrong.ts").write_text(wrong)
    (directory / "node_modules").symlink_to(CACHE / "node_modules")
    options = ["--noEmit", "--strict", "--skipLibCheck", "--module", "nodenext", "--moduleResolution", "nodenext"]
    command = ["node", str(CACHE / "node_modules/typescript/bin/tsc"), *options, "boards.ts", "wrong.ts"]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=110)
    boards, found, others = done.stdout.partition("wrong.ts")
    return {"boards": boards, "wrong": found + others}


def test_dashboards_have_grafanas_types(errors: dict[str, str]):
    assert errors["boards"] == ""


def test_schema_rejects_other_types(errors: dict[str, str]):
    assert "tabel" in errors["wrong"]
    assert "gridPose" in errors["wrong"]
