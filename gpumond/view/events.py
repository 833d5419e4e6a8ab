"""Events as lines, those with one cause as a group. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gpumond.events import MARKS, REPEATS
from gpumond.facts.units import plural
from gpumond.view.text import moment, safe

GROUP_SECONDS = 5.0
"""Time between the first event of a cause and its last, as in the web UI."""
RANKS = {kind: rank for rank, kind in enumerate(MARKS)}


def entry(group: Sequence[Mapping[str, Any]], stamp: Callable[[float], str] = moment) -> str:
    """Return the lines of events with one cause, in their order: the first one, and indented the others.

    Each has its time unless the line before has it. ``stamp`` formats times, all of one width.
    """
    first = group[0]
    repeats = [each for each in group[1:] if first["kind"] in REPEATS and repeat_key(each) == repeat_key(first)]
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
    return f"{time}  {kind:18} {safe(event['summary'])}"


def happened_at(event: Mapping[str, Any]) -> float:
    """Return when an event happened, as far as known, else when the daemon noticed it."""
    return float(dict(event["details"]).get("occurred_at") or event["at"])


def repeat_key(event: Mapping[str, Any]) -> object:
    """Return what an event and its repeats have in common."""
    limit = dict(event["details"]).get("limit_bytes")
    return event["kind"], event["pid"], event["start_ticks"], event["device_uuid"], limit


def folded(events: Iterable[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Return the events in groups, in the order of the first of each; a group's first event tells most.

    Events of one process within seconds are one group, and so are repeats of an out-of-memory error: the same process
    has run into the same limit, or has filled the same device, a short time before.
    """
    groups: list[list[Mapping[str, Any]]] = []
    newest: dict[object, list[Mapping[str, Any]]] = {}
    of_process: dict[object, list[Mapping[str, Any]]] = {}
    for event in events:
        cause, process = repeat_key(event), event["pid"]
        before = newest.get(cause)
        if before and event["at"] - max(each["at"] for each in before) <= REPEATS.get(event["kind"], -1):
            before.append(event)
            continue
        before = of_process.get(process)
        if process is not None and before and event["at"] - before[0]["at"] < GROUP_SECONDS:
            before.append(event)
        else:
            groups.append([event])
            of_process[process] = groups[-1]
        newest[cause] = of_process[process]
    for group in groups:
        group.sort(key=lambda each: RANKS.get(each["kind"], len(RANKS)))
    return groups
