"""Sentences about the entries of an audit log."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpumond.facts.units import duration_text, list_text, plural, size_text
from gpumond.view.text import time_text

MAX_DETAIL_LENGTH, QUOTE = 100, '"'
MAX_PIDS = 8

Detail = Mapping[str, Any]


def audit_sentence(action: str, detail: Any) -> str:
    """Describe an entry. One of an unknown action, or whose detail was shortened, is its action with pairs."""
    try:
        template = SENTENCES[action]
        text = template.format(**detail) if isinstance(template, str) else template(detail)
        operation = "" if action.startswith("flush.") else detail.get("operation")
        return f"{text} (operation {operation})" if operation else text
    except (KeyError, TypeError, ValueError, AttributeError):
        return f"{action}: {detail_text(detail)}"


def detail_text(detail: Any) -> str:
    """Return the detail as pairs of key and value, as many as fit."""
    pairs = detail.items() if isinstance(detail, dict) else [("detail", detail)]
    text = ", ".join(f"{key}: {json.dumps(value).strip(QUOTE)}" for key, value in pairs)
    return (
        text
        if len(text) <= MAX_DETAIL_LENGTH
        else f"{text[:MAX_DETAIL_LENGTH].rpartition(',')[0] or text[:MAX_DETAIL_LENGTH]}, …"
    )


def _program(detail: Detail) -> str:
    return f"{detail['workload'] or 'the program'} (pid {detail['pid']})"


def _pids(detail: Detail) -> str:
    pids = [str(pid) for pid in detail["pids"]]
    more = f" and {len(pids) - MAX_PIDS} more" if len(pids) > MAX_PIDS else ""
    return f"{'pid' if len(pids) == 1 else 'pids'} {', '.join(pids[:MAX_PIDS])}{more}" if pids else "no process"


def _flush(detail: Detail) -> str:
    forced = ", despite the cooldown" if detail.get("force") else ""
    action = "wake-up" if detail.get("wake") else "flush"
    requester = f" for {detail['for']}" if detail.get("for") else ""
    requested, steps = f"{_automatic_prefix(requester)}requested", _steps(detail["steps"])
    target = "all programs" if detail["target"] == "all" else detail["target"]
    return f"{requested} a {action} of {target} with {steps}{requester}{forced}{_operation(detail)}"


def _steps(steps: Sequence[str]) -> str:
    return f"the step{'s' if len(steps) > 1 else ''} {list_text(steps)}"


def _operation(detail: Detail) -> str:
    """Return who requested an operation on several machines, and for which reason; neither is verified."""
    if not detail.get("operation"):
        return ""
    by, reason = detail.get("by"), detail.get("reason")
    return f" (operation {detail['operation']}{f' by {by}' if by else ''}{f': {reason}' if reason else ''})"


def _receipts(detail: Detail) -> str:
    outcomes = [outcome if count == 1 else f"{count} {outcome}" for outcome, count in detail["outcomes"].items()]
    return f"flushed {_pids(detail)}: {size_text(detail['released_bytes'])} released ({', '.join(outcomes)})"


def _automatic_prefix(requester: str) -> str:
    """Return that gpumond acted for a program that waited, and not a person."""
    return "automatically " if requester else ""


def _suspension(detail: Detail) -> str:
    """Describe the receipt of a suspension or resumption."""
    requester = f" for {detail['requested_for']}" if detail.get("requested_for") else ""
    released, returned = detail["released_bytes"], detail.get("returned_bytes")
    result = f"{size_text(released)} released" if released is not None else detail["reason"]
    result = f"{size_text(returned)} back on the GPU" if returned is not None else result
    outcome, program = detail["outcome"], f"{_program(detail)}{requester}"
    if outcome in ("suspended", "resumed"):
        return f"{_automatic_prefix(requester)}{outcome} {program}" + (f": {result}" if result else "")
    return f"couldn't {detail['action']} {program}: {outcome}" + (f" ({result})" if result else "")


def _action(detail: Detail) -> str:
    gpu = dict(detail["labels"]).get("gpu")
    engines = f" and {', '.join(detail['engines'])}" if detail.get("engines") else ""
    return f"ran its action on {_pids(detail)}{engines}" + (f" for GPU {gpu}" if gpu else "")


def _limit(detail: Detail) -> str:
    device = f" on {detail['device']}" if detail["device"] else ""
    if detail["limit_bytes"] is None:
        return f"asked {_program(detail)} to remove its limit{device}"
    return f"asked {_program(detail)} to limit each of its allocators to {size_text(detail['limit_bytes'])}{device}"


def _cgroup_limit(detail: Detail) -> str:
    cgroup, size = detail["cgroup"], detail["limit_bytes"]
    change = f"remove the limit of {cgroup}" if size is None else f"limit {cgroup} to {size_text(size)}"
    return f"asked the driver to {change} on {detail['device']}"


def _answer(detail: Detail) -> str:
    if "answer" in detail:
        return f"pid {detail['pid']} didn't respond in time, or disconnected"
    return f"pid {detail['pid']} responded" + (f": {detail['reason']}" if detail["reason"] else "")


def _override(detail: Detail) -> str:
    fields = ", ".join(f"{name} {json.dumps(value).strip(QUOTE)}" for name, value in detail["body"].items())
    return f"overrode rule {detail['name']}: {fields}"


def _matchers(detail: Detail) -> str:
    return " ".join(f"{each['name']}{each['operator']}{each['value']}" for each in detail["matchers"])


def _silence(detail: Detail) -> str:
    return f"silenced {_matchers(detail)} until {time_text(detail['ends_at'])}: {detail['reason'] or 'no reason given'}"


def _baseline(detail: Detail) -> str:
    of = f" of {detail['workload']}" if detail["workload"] else ""
    return f"started to record baseline {detail['name']}{of} ({duration_text(detail['for_seconds'])})"


def _reload(detail: Detail) -> str:
    later = f"; restart to apply: {', '.join(detail['needs_restart'])}" if detail["needs_restart"] else ""
    return f"reloaded the configuration ({plural(detail['rules'], 'rule')} defined){later}"


SENTENCES: Mapping[str, str | Callable[[Any], str]] = {
    "flush.request": _flush,
    "flush.receipts": _receipts,
    "flush.refused": lambda detail: f"couldn't flush: {detail['problem'].partition('; try again')[0]}",
    "flush.interrupted": "requested a flush that was interrupted: {problem}",
    "suspend.receipt": _suspension,
    "resume.receipt": _suspension,
    "engine.returned": "returned {engine} to service ({outcome})",
    "action": _action,
    "hook.flush": lambda detail: f"accepted the Alertmanager alert {detail['alert']}, for {_pids(detail)}",
    "hook.refused": "couldn't start the flush for an Alertmanager alert",
    "agent.limit": _limit,
    "cgroup.limit": _cgroup_limit,
    "agent.snapshot": lambda detail: f"asked {_program(detail)} for a memory snapshot",
    "agent.classes": lambda detail: f"asked {_program(detail)} what its live memory consists of",
    "agent.retainers": lambda detail: f"asked {_program(detail)} for the lines of code that retain its memory",
    "agent.end": lambda detail: f"asked {_program(detail)} to exit",
    "agent.fetch": lambda detail: f"fetched memory snapshot {detail['snapshot']} of {_program(detail)}",
    **{f"agent.{kind}.answer": _answer for kind in ("limit", "snapshot", "classes", "retainers", "end")},
    "rule.create": "created rule {name}",
    "rule.replace": "replaced rule {name}",
    "rule.delete": "deleted rule {name}",
    "rule.override": _override,
    "rule.restore": "restored rule {name}",
    "quota.create": "created quota {name}",
    "quota.replace": "replaced quota {name}",
    "quota.delete": "deleted quota {name}",
    "silence.create": _silence,
    "silence.expire": lambda detail: f"ended the silence {_matchers(detail)}",
    "baseline.record": _baseline,
    "baseline.compare": lambda detail: (
        f"started to measure memory use for {duration_text(detail['for_seconds'])}, to compare it with baseline "
        f"{detail['name']}"
    ),
    "baseline.delete": "deleted baseline {name}",
    "receiver.test": "sent a test message to receiver {receiver}",
    "release": lambda detail: f"detached the daemon from the driver for {duration_text(detail['for_seconds'])}",
    "reload": _reload,
    "store.set-aside": "renamed the corrupt store to {file}: {reason}",
}
