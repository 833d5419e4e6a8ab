"""Writes the texts of the alerts in deploy/prometheus and deploy/kubernetes/monitoring: ``make docs``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from gpumond.facts.alerts import Rule
from gpumond.features.rules.built_in import BUILT_IN, TEXTS as TEMPLATES, text_for
from gpumond.features.rules.settings import UNITS
from gpumond.quantities.quantity import Unit

DEPLOY = Path(__file__).parents[2] / "deploy"
FILES = (DEPLOY / "prometheus/gpumond.rules.yaml", DEPLOY / "kubernetes/monitoring/prometheusrule.yaml")


_VALUE_TEMPLATES: Mapping[Unit, str] = {
    "bytes": "{{ $value | humanize1024 | reReplaceAll `k` `K` }}B",
    "ratio": "{{ $value | humanizePercentage }}",
    "seconds": "{{ $value | humanizeDuration }}",
}
_PLACEHOLDER_TEMPLATES: Mapping[str, str] = {
    "bytes": "{{ $value | humanize1024 | reReplaceAll `k` `K` }}B",
    "time_to_full": "{{ range printf `gpumond_time_to_full_seconds{cluster=%q, job=%q, instance=%q, uuid=%q, pid=%q}` "
    "$labels.cluster $labels.job $labels.instance $labels.uuid $labels.pid | query }}; the GPU will be full in "
    "{{ .Value | humanizeDuration }}{{ end }}",
    "down_reason": "{{ range printf `gpumond_driver_down_reason{cluster=%q, job=%q, instance=%q}` $labels.cluster "
    "$labels.job $labels.instance | query }}: {{ .Labels.reason }}{{ end }}",
}


def alert_name(rule: str) -> str:
    """Return the name of a rule's alert in Prometheus: GpumondDeviceNearlyFull for device-nearly-full."""
    return "Gpumond" + "".join(word.capitalize() for word in rule.split("-"))


def prometheus_texts(rule: Rule, unit: Unit) -> tuple[str, str]:
    """Return the summary and the description of the rule's alert in Prometheus, templates of Go.

    ``unit``: that of the rule's value.
    """
    templates = {**_PLACEHOLDER_TEMPLATES, "value": _VALUE_TEMPLATES.get(unit, "{{ $value | humanize }}")}

    def expand(text: str) -> str:
        return re.sub(r"\{(\w+)\}", lambda match: templates.get(match[1], f"{{{{ $labels.{match[1]} }}}}"), text)

    summary, description = (expand(text_for(text, 2)) for text in TEMPLATES[rule.name])
    return summary, description


TEXTS = {alert_name(rule.name): prometheus_texts(rule, UNITS[rule.scope][rule.value]) for rule in BUILT_IN}
"""Summary and description of each alert that the daemon has as well."""


def with_texts(text: str) -> str:
    """Return the text of a file of rules with the summaries and descriptions of TEXTS."""
    lines, name = [], ""
    for line in text.split("\n"):
        alert_match = re.match(r" *- alert: (\w+)$", line)
        name = alert_match[1] if alert_match else name
        match = re.match(r"( *)(summary|description): ", line)
        if not match or name not in TEXTS:
            lines.append(line)
        elif match[2] == "summary":
            summary, description = (json.dumps(each, ensure_ascii=False) for each in TEXTS[name])
            lines += [f"{match[1]}summary: {summary}", f"{match[1]}description: {description}"]
    return "\n".join(lines)


if __name__ == "__main__":
    for file in FILES:
        file.write_text(with_texts(file.read_text()))
