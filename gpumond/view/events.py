"""Events as lines, those with one cause as a group. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gpumond.events import CONSEQUENCES, EVENT_MARKS, REPEAT_SECONDS
from gpumond.facts.units import plural
from gpumond.view.text import printable, time_text

GROUP_SECONDS = 5.0
"""Time between an event and those that follow from it, as in the web UI."""
ORDER_BY_KIND = {kind: order for order, kind in enumerate(EVENT_MARKS)}


def group_text(group: Sequence[Mapping[str, Any]], stamp: Callable[[float], str] = time_text) -> str:
    """Return the lines of events with one cause, in their order: the first one, and indented the others.

    Each has its time unless the line before has it. ``stamp`` formats times, all of one width.
    """
    first = group[0]
    repeats = group[1:] if first["kind"] in REPEAT_SECONDS else ()
    again = f" ({plural(len(repeats) + 1, 'time')}, the last at {stamp(repeats[-1]['at'])})" if repeats else ""
    lines, before = list[str](), ""
    for each in sorted((each for each in group if each not in repeats), key=lambda each: each["id"]):
        at = stamp(happened_at(each))
        line = _line(each, " " * len(at) if at == before else at, "  " if lines else "")
        lines.append(line + (again if each is first else ""))
        before = at
    return "\n".join(lines)


def _line(event: Mapping[str, Any], time: str, indent: str) -> str:
    kind = indent + ("out-of-memory" if event["kind"] == "oom" else event["kind"].replace("-", " "))
    return f"{time}  {kind:18} {printable(event['summary'])}"


def happened_at(event: Mapping[str, Any]) -> float:
    """Return when an event happened, as far as known, else when the daemon noticed it."""
    return float(dict(event["details"]).get("occurred_at") or event["at"])


def repeat_key(event: Mapping[str, Any]) -> object:
    """Return what an event and its repeats have in common."""
    limit = dict(event["details"]).get("limit_bytes")
    return event["kind"], event["pid"], event["start_ticks"], event["device_uuid"], limit


def group_events(events: Iterable[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Return the events in groups, in the order of their times; a group's first event tells most.

    The others of a group follow from it, as ``CONSEQUENCES`` says of one process's events within seconds, or repeat its
    out-of-memory error: the same process has run into the same limit, or has filled the same device, a short time
    before.
    """
    groups: list[list[Mapping[str, Any]]] = []
    for event in sorted(events, key=lambda each: (ORDER_BY_KIND.get(each["kind"], len(ORDER_BY_KIND)), each["id"])):
        group = next((each for each in groups if _follows(event, each[0]) or _repeats(event, each[-1])), None)
        if group is None:
            groups.append([event])
        else:
            group.append(event)
    return sorted(groups, key=lambda group: (happened_at(group[0]), min(int(each["id"]) for each in group)))


def _follows(event: Mapping[str, Any], first: Mapping[str, Any]) -> bool:
    return (
        event["pid"] is not None
        and event["pid"] == first["pid"]
        and event["kind"] in CONSEQUENCES.get(first["kind"], ())
        and abs(event["at"] - first["at"]) < GROUP_SECONDS
        and _rule(first) in (None, _rule(event))
    )


def _rule(event: Mapping[str, Any]) -> object:
    """Return the rule of an alert, or the kind of a verdict."""
    details = dict(event["details"])
    return details.get("rule", details.get("verdict"))


def _repeats(event: Mapping[str, Any], error: Mapping[str, Any]) -> bool:
    return event["at"] - error["at"] <= REPEAT_SECONDS.get(event["kind"], -1) and repeat_key(event) == repeat_key(error)
