"""Write the dashboards: `python -m grafana.build`. A test checks that the files are current."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from grafana import daemon, device, fleet, job, workload
from grafana.frames import INPUT

DIRECTORY = Path(__file__).with_name("dashboards")
BOARDS: Mapping[str, Dashboard] = {
    "fleet": fleet.BOARD,
    "device": device.BOARD,
    "workload": workload.BOARD,
    "job": job.BOARD,
    "daemon": daemon.BOARD,
}

OF_INTERVALS = ("auto", "auto_count", "auto_min")
"""What the builders give every variable, and only those of intervals may have."""


IMPORT: Mapping[str, object] = {
    "__inputs": [
        {
            "name": INPUT,
            "label": "Prometheus",
            "type": "datasource",
            "pluginId": "prometheus",
            "pluginName": "Prometheus",
        }
    ],
    "__requires": [
        {"type": "grafana", "id": "grafana", "name": "Grafana", "version": "11.6.0"},
        {"type": "datasource", "id": "prometheus", "name": "Prometheus", "version": "1.0.0"},
    ],
    "__elements": {},
}
"""What Grafana asks for at an import by hand. A provisioned dashboard ignores it and uses the default data source."""


def text(board: Dashboard) -> str:
    plain = {**IMPORT, **json.loads(json.dumps(board, cls=JSONEncoder))}
    panels = [each for panel in plain["panels"] for each in (panel, *panel.get("panels", ()))]
    for number, panel in enumerate(panels, 1):
        panel["id"] = number
    for variable in plain["templating"]["list"]:
        for key in OF_INTERVALS:
            del variable[key]
    return json.dumps(_without_nulls(plain), indent=2, sort_keys=True) + "\n"


def _without_nulls(value: object, key: str = "") -> object:
    """The builders write null for what is not set, which the schema does not know; a threshold's is minus infinity."""
    if isinstance(value, dict):
        kept = {name: _without_nulls(inner, name) for name, inner in value.items()}
        return {name: inner for name, inner in kept.items() if inner is not None or key == "steps"}
    if isinstance(value, list):
        return [_without_nulls(inner, key) for inner in value]
    return value


def main() -> None:
    for name, board in BOARDS.items():
        (DIRECTORY / f"{name}.json").write_text(text(board))


if __name__ == "__main__":
    main()
