"""Rules in the configuration file and in the API; docs/reference/rules.md describes the keys."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PrivateAttr,
    StrictBool,
    field_validator,
    model_validator,
)
from pydantic.functional_validators import ModelWrapValidatorHandler

from gpumond.config.models import Seconds, StrictModel
from gpumond.facts import units
from gpumond.facts.alerts import Action, Rule, RuleScope
from gpumond.facts.errors import did_you_mean
from gpumond.facts.pools import DEFAULT_STEPS, ENGINE_STEP, ordered_steps
from gpumond.facts.units import has_control_characters
from gpumond.features.rules.evaluation import PLACEHOLDER
from gpumond.quantities import SCOPES
from gpumond.quantities.quantity import Quantity, Unit

UNITS: Mapping[RuleScope, Mapping[str, Unit]] = {
    scope: {value.name: value.unit for value in spec.quantities} for scope, spec in SCOPES.items()
}
QUANTITIES: Mapping[RuleScope, Mapping[str, Quantity[Any]]] = {
    scope: {value.name: value for value in spec.quantities} for scope, spec in SCOPES.items()
}
LABELS: Mapping[RuleScope, Mapping[str, str]] = {scope: spec.label_meanings for scope, spec in SCOPES.items()}
"""Labels that ``match`` can use."""

_COMMON_PLACEHOLDERS = {"value": "the rule's value, with its unit", "threshold": "the rule's threshold, with its unit"}
PLACEHOLDERS: Mapping[RuleScope, Mapping[str, str]] = {
    scope: {**_COMMON_PLACEHOLDERS, **{name: meaning for name, (meaning, _) in spec.placeholders.items()}}
    for scope, spec in SCOPES.items()
}


def match_keys(scope: RuleScope) -> Mapping[str, str]:
    """Return the keys of ``match``: the labels, and the device by any of its names."""
    device = {"device": "index, UUID, UUID prefix or PCI address of the device; not a glob"}
    return {**LABELS[scope], **(device if "uuid" in LABELS[scope] else {})}


Threshold = Annotated[float, BeforeValidator(units.parse_threshold)]

LABEL_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


class FlushConfig(StrictModel):
    min_reclaimable: Threshold = Field(default=0.0, ge=0)
    steps: Annotated[tuple[str, ...], AfterValidator(ordered_steps)] = DEFAULT_STEPS
    only_idle_for: Seconds = 0.0

    @model_validator(mode="after")
    def _check_idle_engines(self) -> FlushConfig:
        if self.only_idle_for and ENGINE_STEP not in self.steps:
            raise ValueError("only_idle_for applies to serving engines: add the step engine, as in steps: [engine]")
        return self


class ActionConfig(StrictModel):
    flush: FlushConfig | None = None
    suspend: bool = False
    cooldown: Seconds = Field(default=600.0, ge=1)
    max_per_hour: int = Field(default=6, ge=1, le=3600)
    workloads: tuple[str, ...] = Field(default=("*",), min_length=1)
    dry_run: bool = False
    request_end: bool = False

    @model_validator(mode="after")
    def _check_not_empty(self) -> ActionConfig:
        if self.flush is None and not self.suspend:
            raise ValueError("set at least one of flush and suspend, as in flush: {}")
        return self

    def action(self) -> Action:
        flush = self.flush or FlushConfig()
        return Action(
            min_reclaimable_bytes=int(flush.min_reclaimable),
            steps=flush.steps if self.flush is not None else (),
            cooldown_seconds=self.cooldown,
            max_per_hour=self.max_per_hour,
            workloads=self.workloads,
            dry_run=self.dry_run,
            only_idle_for_seconds=flush.only_idle_for,
            request_end=self.request_end,
            suspend=self.suspend,
        )


def _values_text() -> str:
    """Return the values of all scopes with their units."""
    scopes = (
        f"{scope}: " + ", ".join(f"{name} ({unit})" for name, unit in units.items()) for scope, units in UNITS.items()
    )
    return "one of the scope's values. " + ". ".join(scopes)


NAMES_BY_SCOPE: dict[str, Any] = {
    "x-values": {scope: dict(units) for scope, units in UNITS.items()},
    "x-meanings": {
        scope: {name: quantity.meaning for name, quantity in quantities.items()}
        for scope, quantities in QUANTITIES.items()
    },
}
"""Names of the values of each scope with their units and meanings, for the page."""


class RuleConfig(StrictModel):
    name: str = Field(pattern=r"^[a-z0-9_-]{1,64}$")
    scope: RuleScope
    value: str = Field(description=_values_text(), json_schema_extra=NAMES_BY_SCOPE)
    above: Threshold | None = None
    below: Threshold | None = None
    clear: Threshold | None = None
    for_: Seconds = Field(default=0.0, alias="for")
    keep_firing_for: Seconds = 0.0
    match: dict[str, str] = Field(default_factory=dict)
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
    receivers: tuple[str, ...] = ()
    action: ActionConfig | None = None

    @field_validator("labels", "annotations")
    @classmethod
    def _check_names(cls, texts: dict[str, str]) -> dict[str, str]:
        for name in texts:
            if not LABEL_NAME.fullmatch(name):
                raise ValueError(f"{name!r:.40} isn't a valid label name: expected letters, digits and _")
        return texts

    @field_validator("match", "labels")
    @classmethod
    def _check_printable(cls, texts: dict[str, str]) -> dict[str, str]:
        for name, text in texts.items():
            if has_control_characters(text):
                raise ValueError(f"{name!r:.40}: {text!r:.40} has a control character, such as a newline; remove it")
        return texts

    @model_validator(mode="before")
    @classmethod
    def _check_units(cls, body: Any) -> Any:
        """Refuse a size or a percentage as the threshold of a value that is neither."""
        of_scope: Mapping[Any, Mapping[str, Unit]] = UNITS
        named = isinstance(body, dict) and isinstance(body.get("scope"), str) and isinstance(body.get("value"), str)
        unit = of_scope.get(body["scope"], {}).get(body["value"]) if named else None
        for name in ("above", "below", "clear") if unit else ():
            check_unit(name, body.get(name), body["value"], unit)
        return body

    @model_validator(mode="after")
    def _check_threshold(self) -> RuleConfig:
        if self.value not in QUANTITIES[self.scope]:
            hint = (
                did_you_mean(self.value, QUANTITIES[self.scope]) or "; docs/reference/rules.md#values lists the values"
            )
            raise ValueError(f"scope {self.scope} has no value {self.value!r}{hint}")
        if (self.above is None) == (self.below is None):
            raise ValueError("set exactly one of above and below")
        if self.value == "time_to_full_seconds" and self.below is None:
            raise ValueError("time_to_full_seconds is infinite without growth; set below instead of above")
        if self.clear is not None:
            bound = self.above if self.above is not None else self.below
            assert bound is not None
            if (self.clear > bound) if self.above is not None else (self.clear < bound):
                raise ValueError("`clear` must not be higher than `above`, or lower than `below`")
        _require_known(self.match, match_keys(self.scope), f"scope {self.scope} has no label", "match")
        for name, text in self.annotations.items():
            used = PLACEHOLDER.findall(text)
            _require_known(
                used, PLACEHOLDERS[self.scope], f"scope {self.scope} has no placeholder", f"annotations.{name}"
            )
        taken = [name for name in self.labels if name == "alertname" or name in LABELS[self.scope]]
        if taken:
            raise ValueError(f"labels: {taken[0]!r} is set by gpumond itself; choose another name")
        if self.action is not None and self.scope == "daemon":
            raise ValueError("action: scope daemon has nothing to flush")
        if self.action is not None and self.action.request_end and self.scope != "process":
            raise ValueError("action: request_end requires the process scope, because the action affects one program")
        if self.action is not None and self.action.suspend and self.scope != "process":
            raise ValueError("action: suspend requires the process scope, because the action affects one program")
        return self

    def rule(self) -> Rule:
        return Rule(
            name=self.name,
            scope=self.scope,
            value=self.value,
            above=self.above,
            below=self.below,
            clear=self.clear,
            for_seconds=self.for_,
            keep_firing_for_seconds=self.keep_firing_for,
            match=tuple(self.match.items()),
            labels=tuple(self.labels.items()),
            annotations=tuple(self.annotations.items()),
            receivers=self.receivers,
            action=self.action.action() if self.action else None,
        )


def check_unit(name: str, threshold: object, value: str, unit: Unit | None) -> None:
    """Refuse a size or a percentage as the threshold of a value that is neither. Raises ValueError."""
    text = str(threshold).strip()
    if (text.endswith("%") and unit != "ratio") or (text.endswith("B") and unit not in ("bytes", "bytes/s")):
        kind = "percentage" if text.endswith("%") else "size"
        unit_texts = {"boolean": "is 0 or 1", "ratio": "is a ratio", "count": "is a count", None: "has no unit"}
        what = unit_texts.get(unit, f"has the unit {unit}")
        raise ValueError(f"{name}: {text:.40} is a {kind}, but `{value}` {what}")


def check_range(threshold: float | None, quantity: Quantity[Any], above: bool) -> None:
    """Refuse a threshold that no value can be above, or below. Raises ValueError."""
    if threshold is None or not quantity.range_text or (threshold < 1 if above else threshold > 0):
        return
    valid = "less than 1" if above else "more than 0"
    example = "" if quantity.is_boolean else ", such as 90%"
    never = f"{quantity.name} is {quantity.range_text}, so the alert could never fire"
    raise ValueError(f"threshold: {threshold:g} is out of range: {never}; set a threshold of {valid}{example}")


class OverrideConfig(StrictModel):
    """Fields that replace those of a built-in rule; docs/how-to/rules.md describes them."""

    threshold: Threshold | None = Field(default=None, description="replaces the threshold of `above` or `below`")
    for_: Seconds | None = Field(default=None, alias="for", description="replaces the duration `for`")
    severity: str | None = Field(
        default=None, pattern=r"^[a-z0-9_-]{1,64}$", description="replaces the `severity` label"
    )
    enabled: StrictBool | None = Field(default=None, description="false: the rule isn't evaluated")

    _threshold_text: str = PrivateAttr("")
    """The threshold as it was written, with its unit."""

    @model_validator(mode="wrap")
    @classmethod
    def _keep_unit(cls, body: Any, read: ModelWrapValidatorHandler[OverrideConfig]) -> OverrideConfig:
        override = read(body)
        override._threshold_text = str(body.get("threshold")) if isinstance(body, Mapping) else ""
        return override

    def check(self, rule: Rule) -> None:
        """Refuse a threshold without the unit or the range of the rule's value. Raises ValueError."""
        quantity = QUANTITIES[rule.scope][rule.value]
        check_unit("threshold", self._threshold_text, rule.value, quantity.unit)
        check_range(self.threshold, quantity, above=rule.below is None)

    @model_validator(mode="after")
    def _check_not_empty(self) -> OverrideConfig:
        if not self.fields():
            raise ValueError("set at least one of threshold, for, severity, enabled")
        return self

    def fields(self) -> dict[str, Any]:
        """Return the fields that are set, by their names in the configuration."""
        values = {"threshold": self.threshold, "for": self.for_, "severity": self.severity, "enabled": self.enabled}
        return {name: value for name, value in values.items() if value is not None}


def _require_known(used: Iterable[str], known: Mapping[str, str], what: str, place: str) -> None:
    for word in used:
        if word not in known:
            raise ValueError(f"{place}: {what} {word!r:.40}; it has {', '.join(known) or 'none'}")


def rule_body(rule: Rule) -> dict[str, Any]:
    """Return the rule with the keys of `config.RuleConfig`, which reads it back unchanged."""
    body: dict[str, Any] = {"name": rule.name, "scope": rule.scope, "value": rule.value}
    numbers = {
        "above": rule.above,
        "below": rule.below,
        "clear": rule.clear,
        "for": rule.for_seconds or None,
        "keep_firing_for": rule.keep_firing_for_seconds or None,
    }
    body.update({name: number for name, number in numbers.items() if number is not None})
    texts = {"match": dict(rule.match), "labels": dict(rule.labels), "annotations": dict(rule.annotations)}
    body.update({name: text for name, text in texts.items() if text})
    if rule.receivers:
        body["receivers"] = list(rule.receivers)
    if (action := rule.action) is not None:
        idle = {"only_idle_for": action.only_idle_for_seconds} if action.only_idle_for_seconds else {}
        flush = {"min_reclaimable": action.min_reclaimable_bytes, "steps": list(action.steps), **idle}
        body["action"] = {
            **({"flush": flush} if action.steps else {}),
            **({"suspend": True} if action.suspend else {}),
            "cooldown": action.cooldown_seconds,
            "max_per_hour": action.max_per_hour,
            "workloads": list(action.workloads),
            "dry_run": action.dry_run,
            **({"request_end": True} if action.request_end else {}),
        }
    return body
