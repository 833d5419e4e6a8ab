"""Captions of the demo: what is true of its daemon, each said once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpumond.facts.units import GIB, human

LARGE_CACHE = 2 * GIB
"""Cached bytes from which a program's cache is worth a caption."""


def captions(frame: Mapping[str, Any], receipts: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield the subject of each caption that is true now, and its text.

    Args:
        frame: The response of `/api/v1/frame`.
        receipts: That of `/api/v1/receipts`.
    """
    for wait in frame["queue"]:
        yield "queue", f"A program waits for {human(wait['need_bytes'])} of a GPU. See: gpumond queue"
    for process in frame["processes"]:
        name, cached, live = process["workload"], process["cached_bytes"] or 0, process["live_bytes"] or 0
        if name == "training" and cached >= LARGE_CACHE:
            text = f"{name} uses {human(live)}, and keeps {human(cached)} that a flush would release"
            yield "cache", f"{text}. Try: gpumond flush {name}"
    for verdict in frame["verdicts"]:
        if verdict["kind"] in ("leak", "fragmentation"):
            yield verdict["kind"], f"{verdict['summary']}. Try: gpumond why {verdict['kind']}"
    for receipt in receipts:
        if receipt["outcome"] == "freed" and receipt["released_bytes"]:
            released, by = human(receipt["released_bytes"]), receipt["requested_by"].replace(":", " ")
            yield "flush", f"A flush of {receipt['workload']} released {released} ({by}). See: gpumond receipts"
    for alert in frame["alerts"]:
        if case := dict(alert["annotations"]).get("case"):
            labels = dict(alert["labels"])
            name = labels.get("workload", "A program")
            yield "oom", f"{name} ran out of memory on GPU {labels.get('gpu')}. See: gpumond oom show {case}"
