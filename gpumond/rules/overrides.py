"""Overrides: single fields of a built-in rule that are replaced. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gpumond.rules import Rule

Overrides = Mapping[str, Mapping[str, Any]]
"""The replaced fields of rules, by the names of rules and fields."""


def own_fields(rule: Rule) -> dict[str, Any]:
    """Return the rule's own values of the fields that can be replaced."""
    level = rule.below if rule.above is None else rule.above
    return {
        "level": float(level or 0),
        "for": float(rule.for_seconds),
        "severity": dict(rule.labels).get("severity", ""),
        "enabled": True,
    }


def overridden(rule: Rule, fields: Mapping[str, Any]) -> Rule:
    """Return the rule with other values of ``level``, ``for`` and ``severity``.

    The level of ``clear`` keeps its ratio to the level; a negative level is also that of ``clear``.
    """
    changes: dict[str, Any] = {}
    if "level" in fields:
        level, own = fields["level"], own_fields(rule)["level"]
        side, limit = ("below", max) if rule.above is None else ("above", min)
        changes[side] = level
        if rule.clear is not None and own:
            changes["clear"] = limit(rule.clear * (level / own), level)
    if "for" in fields:
        changes["for_seconds"] = fields["for"]
    if "severity" in fields:
        changes["labels"] = tuple({**dict(rule.labels), "severity": fields["severity"]}.items())
    return replace(rule, **changes)
