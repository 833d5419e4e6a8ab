"""Overrides of the fields of built-in rules."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpumond.facts.alerts import Rule, overridden, own_fields
from gpumond.features.rules.built_in import BUILT_IN
from gpumond.features.rules.settings import OverrideConfig, RuleConfig, written


@pytest.mark.parametrize("rule", BUILT_IN, ids=lambda rule: rule.name)
def test_own_values_of_a_built_in_rule_are_an_override_without_effect(rule: Rule):
    own = own_fields(rule)
    assert OverrideConfig.model_validate(own).fields() == own
    assert overridden(rule, own) == rule
    assert overridden(rule, {}) == rule


@pytest.mark.parametrize("rule", BUILT_IN, ids=lambda rule: rule.name)
@pytest.mark.parametrize("threshold", [-1.0, 0.0, 0.01, 0.5, 40.0])
def test_overridden_rule_is_valid(rule: Rule, threshold: float):
    changed = overridden(rule, {"threshold": threshold, "for": 5.0, "severity": "page"})
    assert RuleConfig.model_validate(written(changed)).rule() == changed
    assert changed.above == threshold or changed.below == threshold


def test_clear_level_keeps_its_ratio():
    rule = Rule(name="r", scope="device", value="used_ratio", above=0.8, clear=0.6)
    assert overridden(rule, {"threshold": 0.4}).clear == pytest.approx(0.3)
    below = replace(rule, above=None, below=0.5, clear=0.6)
    assert overridden(below, {"threshold": 0.25}).clear == pytest.approx(0.3)


def test_severity_replaces_only_its_label():
    rule = Rule(name="r", scope="device", value="up", below=1, labels=(("team", "a"), ("severity", "info")))
    assert overridden(rule, {"severity": "page"}).labels == (("team", "a"), ("severity", "page"))
