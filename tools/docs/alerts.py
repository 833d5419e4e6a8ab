"""Writes the summaries of the alerts in deploy/prometheus and deploy/kubernetes/monitoring: ``make docs``."""

from __future__ import annotations

import json
import re
from pathlib import Path

from gpumond.features.rules.built_in import BUILT_IN, prometheus_summary
from gpumond.features.rules.settings import UNITS

DEPLOY = Path(__file__).parents[2] / "deploy"
FILES = (DEPLOY / "prometheus/gpumond.rules.yaml", DEPLOY / "kubernetes/monitoring/prometheusrule.yaml")


def alert_name(rule: str) -> str:
    """Return the name of a rule's alert in Prometheus: GpumondDeviceNearlyFull for device-nearly-full."""
    return "Gpumond" + "".join(word.capitalize() for word in rule.split("-"))


SUMMARIES = {alert_name(rule.name): prometheus_summary(rule, UNITS[rule.scope][rule.value]) for rule in BUILT_IN}
"""Summary of each alert that the daemon has as well."""


def with_summaries(text: str) -> str:
    """Return the text of a file of rules with the summaries of SUMMARIES."""
    lines, name = [], ""
    for line in text.split("\n"):
        found = re.match(r" *- alert: (\w+)$", line)
        name = found[1] if found else name
        if line.lstrip().startswith("summary: ") and name in SUMMARIES:
            line = line[: line.index("summary: ")] + "summary: " + json.dumps(SUMMARIES[name], ensure_ascii=False)
        lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    for file in FILES:
        file.write_text(with_summaries(file.read_text()))
