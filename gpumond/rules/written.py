"""Rules in the format of the configuration file. No I/O."""

from __future__ import annotations

from typing import Any

from gpumond.rules import Rule


def written(rule: Rule) -> dict[str, Any]:
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
    body.update({name: own for name, own in texts.items() if own})
    if rule.receivers:
        body["receivers"] = list(rule.receivers)
    if (action := rule.action) is not None:
        idle = {"only_idle_for": action.only_idle_for_seconds} if action.only_idle_for_seconds else {}
        body["action"] = {
            "flush": {"min_reclaimable": action.min_reclaimable_bytes, "steps": list(action.steps), **idle},
            "cooldown": action.cooldown_seconds,
            "max_per_hour": action.max_per_hour,
            "workloads": list(action.workloads),
            "dry_run": action.dry_run,
            **({"request_end": True} if action.request_end else {}),
        }
    return body
