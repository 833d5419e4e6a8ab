"""Rules: conditions on the values of subjects, and what happens when one holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from gpumond.facts.pools import DEFAULT_STEPS, ENGINE_STEP

Scope = Literal["device", "process", "pool", "workload", "engine", "daemon"]


Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """A flush of the alert's subject when it fires, with its limits; ``workloads`` are globs.

    ``dry_run`` plans and notifies, and flushes nothing. ``only_idle_for_seconds``: serving engines are flushed once
    they have had no request for so long. ``request_end``: programs are asked to end after the flush. ``suspend``: those
    that allow it are suspended after the flush.
    """

    min_reclaimable_bytes: int = 0
    steps: tuple[str, ...] = DEFAULT_STEPS
    cooldown_seconds: float = 600.0
    max_per_hour: int = 6
    workloads: tuple[str, ...] = ("*",)
    dry_run: bool = False
    only_idle_for_seconds: float = 0.0
    request_end: bool = False
    suspend: bool = False

    @property
    def program_steps(self) -> tuple[str, ...]:
        """The steps without that of serving engines."""
        return tuple(step for step in self.steps if step != ENGINE_STEP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One threshold (``above`` or ``below``), how long it must be exceeded, and its subjects (``match``, globs on
    labels).

    ``receivers`` are names from the configuration; none means all.
    """

    name: str
    scope: Scope
    value: str
    above: float | None = None
    below: float | None = None
    clear: float | None = None
    for_seconds: float = 0.0
    keep_firing_for_seconds: float = 0.0
    match: Labels = ()
    labels: Labels = ()
    annotations: Labels = ()
    receivers: tuple[str, ...] = ()
    action: Action | None = None

    def breached(self, value: float, active: bool) -> bool:
        """Return True if ``value`` is beyond the threshold, or, while active, not yet back past ``clear``."""
        if self.above is not None:
            return value > (self.clear if active and self.clear is not None else self.above)
        if self.below is not None:
            return value < (self.clear if active and self.clear is not None else self.below)
        return False

    def concerns(self, labels: Mapping[str, str], programs: Sequence[str]) -> bool:
        for name, pattern in self.match:
            own = programs if name == "workload" and name not in labels else (labels.get(name, ""),)
            if not any(fnmatchcase(text, pattern) for text in own):
                return False
        return True


Overrides = Mapping[str, Mapping[str, Any]]
"""The replaced fields of rules, by the names of rules and fields."""


def own_fields(rule: Rule) -> dict[str, Any]:
    """Return the rule's own values of the fields that can be replaced."""
    threshold = rule.below if rule.above is None else rule.above
    return {
        "threshold": float(threshold or 0),
        "for": float(rule.for_seconds),
        "severity": dict(rule.labels).get("severity", ""),
        "enabled": True,
    }


def overridden(rule: Rule, fields: Mapping[str, Any]) -> Rule:
    """Return the rule with other values of ``threshold``, ``for`` and ``severity``.

    The threshold of ``clear`` keeps its ratio to the threshold; a negative threshold is also that of ``clear``.
    """
    changes: dict[str, Any] = {}
    if "threshold" in fields:
        threshold, own = fields["threshold"], own_fields(rule)["threshold"]
        side, limit = ("below", max) if rule.above is None else ("above", min)
        changes[side] = threshold
        if rule.clear is not None and own:
            changes["clear"] = limit(rule.clear * (threshold / own), threshold)
    if "for" in fields:
        changes["for_seconds"] = fields["for"]
    if "severity" in fields:
        changes["labels"] = tuple({**dict(rule.labels), "severity": fields["severity"]}.items())
    return replace(rule, **changes)
