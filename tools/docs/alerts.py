"""Writes the texts of the alerts in deploy/prometheus and deploy/kubernetes/monitoring: ``make docs``."""

from __future__ import annotations

import json
import re
from pathlib import Path

from gpumond.features.rules.built_in import BUILT_IN, prometheus_texts
from gpumond.features.rules.settings import UNITS

DEPLOY = Path(__file__).parents[2] / "deploy"
FILES = (DEPLOY / "prometheus/gpumond.rules.yaml", DEPLOY / "kubernetes/monitoring/prometheusrule.yaml")


def alert_name(rule: str) -> str:
    """Return the name of a rule's alert in Prometheus: GpumondDeviceNearlyFull for device-nearly-full."""
    return "Gpumond" + "".join(word.capitalize() for word in rule.split("-"))


TEXTS = {alert_name(rule.name): prometheus_texts(rule, UNITS[rule.scope][rule.value]) for rule in BUILT_IN}
"""Summary and description of each alert that the daemon has as well."""


def with_texts(text: str) -> str:
    """Return the text of a file of rules with the summaries and descriptions of TEXTS."""
    lines, name = [], ""
    for line in text.split("\n"):
        alert = re.match(r" *- alert: (\w+)$", line)
        name = alert[1] if alert else name
        found = re.match(r"( *)(summary|description): ", line)
        if not found or name not in TEXTS:
            lines.append(line)
        elif found[2] == "summary":
            summary, description = (json.dumps(each, ensure_ascii=False) for each in TEXTS[name])
            lines += [f"{found[1]}summary: {summary}", f"{found[1]}description: {description}"]
    return "\n".join(lines)


if __name__ == "__main__":
    for file in FILES:
        file.write_text(with_texts(file.read_text()))
