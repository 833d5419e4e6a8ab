"""Text of what the live memory of a program consists of. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpumond.facts.program import CLASS_NAMES
from gpumond.facts.units import size_text

REGISTERED = 4
"""Number of classes that need no search of the heap: the first ones."""
SHOWN_PAUSE, SHOWN_AGE = 0.001, 0.1
CALLS = 4
"""Number of calls of a site that are shown."""


def why_lines(answer: Mapping[str, Any], gpus: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of the text for people. ``gpus``: names of devices by UUID."""
    for breakdown in answer["classes"]:
        device = gpus.get(breakdown["device_uuid"], breakdown["device_uuid"])
        yield f"{breakdown['allocator']} on {device}: {size_text(breakdown['live_bytes'])} live{_age(answer)}"
        known = {text: size for name, text in CLASS_NAMES.items() if (size := breakdown[f"{name}_bytes"]) is not None}
        rest = breakdown["live_bytes"] - sum(known.values())
        if len(known) < len(CLASS_NAMES):
            known["unknown" if len(known) < REGISTERED else "other tensors and activations"] = max(0, rest)
        for text, size in known.items():
            if not size:
                continue
            yield f"  {size_text(size):>10}  {size / (breakdown['live_bytes'] or 1):4.0%}  {text}"
            if text == CLASS_NAMES["tensors"] and answer["kv_cache_bytes"] is not None:
                yield f"  {size_text(answer['kv_cache_bytes']):>10}        of this is KV cache"
        if breakdown["excess_bytes"]:
            yield f"  {size_text(breakdown['excess_bytes']):>10}        of the live memory belongs to another allocator"
    if answer["reason"]:
        yield answer["reason"]
    if answer["paused_seconds"] >= SHOWN_PAUSE:
        yield f"the program paused for at most {1000 * answer['paused_seconds']:.0f} ms"
    if answer["sites"]:
        yield "live memory by the line that allocated it:"
        for site in answer["sites"]:
            yield f"  {size_text(site['size_bytes']):>10}  {_stack(site['calls'])}"
        yield f"  {size_text(answer['unrecorded_bytes']):>10}  allocated before the recording"
    for name, title in (("snapshot", "memory snapshot"), ("folded", "stacks for flame graphs")):
        if answer[name] is not None and answer[name]["path"] is not None:
            yield f"{title}: {answer[name]['path']}"
    for clause in answer["advice"]:
        yield f"advice: {clause}"


def _age(answer: Mapping[str, Any]) -> str:
    age = answer["age_seconds"]
    return f", {age:.1f} s ago" if age >= SHOWN_AGE else ""


def _stack(calls: Sequence[Mapping[str, Any]]) -> str:
    shown = [f"{call['file'].rpartition('/')[2]}:{call['line']} {call['function']}" for call in calls[:CALLS]]
    return " < ".join(shown) or "no Python stack"
