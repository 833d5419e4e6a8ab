"""Names that rules of each scope can use: values, labels to match, placeholders.

docs/reference/rules.md is generated from these tables, and a rule with another name is rejected.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpumond.quantities import Unit
from gpumond.rules import Scope
from gpumond.rules.scopes import SCOPES

VALUES: Mapping[Scope, Mapping[str, str]] = {
    scope: {value.name: value.meaning for value in spec.values} for scope, spec in SCOPES.items()
}
UNITS: Mapping[Scope, Mapping[str, Unit]] = {
    scope: {value.name: value.unit for value in spec.values} for scope, spec in SCOPES.items()
}
LABELS: Mapping[Scope, Mapping[str, str]] = {scope: spec.labels for scope, spec in SCOPES.items()}
"""Labels that ``match`` can use."""

_ALWAYS = {"value": "the rule's value, with its unit", "level": "the rule's level, with its unit"}
PLACEHOLDERS: Mapping[Scope, Mapping[str, str]] = {
    scope: {**_ALWAYS, **spec.placeholders} for scope, spec in SCOPES.items()
}


def matches(scope: Scope) -> Mapping[str, str]:
    """Return the keys of ``match``: the labels, and the device by any of its names."""
    named = {"device": "index, UUID, beginning of the UUID, or PCI address of the device; no glob"}
    return {**LABELS[scope], **(named if "uuid" in LABELS[scope] else {})}
