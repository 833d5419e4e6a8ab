"""Amounts that texts state of a program now, compared with the row beside them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from gpumond.facts.alerts import ENDED_PREFIX
from gpumond.facts.units import size_text

CLAIMS = {
    r"uses {}": "used_bytes",
    r"holds {} of cached memory": "cached_bytes",
    r"\({} stranded\)": "stranded_bytes",
    r"held, {} live": "live_bytes",
    r"; {} is stranded": "stranded_bytes",
    r"suspend --pid \d+ returns {}": "used_bytes",
    r"(?:flush --pid \d+|Flush) returns {}": "reclaimable",
}
"""A text's words, and the value of the row that the amount repeats."""
SIZE = r"([\d.]+ (?:[KMGT]i)?B)"


def contradictions(frame: Any) -> Iterator[str]:
    """Yield the texts of a frame's alerts and verdicts with an amount that isn't the row's."""
    for alert in frame["alerts"]:
        uuid = dict(alert["labels"]).get("uuid")
        for text in dict(alert["annotations"]).values():
            yield from _contradictions(frame, uuid, alert["pid"], text)
    for verdict in frame["verdicts"]:
        yield from _contradictions(frame, verdict["device_uuid"], verdict["pid"], verdict["summary"])


def contradictions_of_cards(frame: Any, cards: Iterable[str]) -> Iterator[str]:
    """Yield the web UI's cards with an amount that isn't the row's."""
    index = {device["uuid"]: device["index"] for device in frame["snapshot"]["devices"]}
    for process in frame["processes"]:
        who = f"{process['workload'] or process['comm']} on GPU {index[process['device_uuid']]}"
        for card in cards:
            if who in card and ENDED_PREFIX not in card:
                yield from _contradictions(frame, process["device_uuid"], process["pid"], card)


def _contradictions(frame: Any, uuid: str | None, pid: int | None, text: str) -> Iterator[str]:
    rows = (each for each in frame["processes"] if (each["device_uuid"], each["pid"]) == (uuid, pid))
    row = next(rows, None)
    if row is None or text.startswith(ENDED_PREFIX):  # an ended alert states the past
        return
    for words, column in CLAIMS.items():
        stated = re.search(words.format(SIZE), text)
        if stated and stated[1] != size_text(_reclaimable(frame, row) if column == "reclaimable" else row[column] or 0):
            yield f"{text!r} isn't the row's {column}"


def _reclaimable(frame: Any, row: Any) -> int:
    reports = (each for each in frame["snapshot"]["reports"] if each["pid"] == row["pid"])
    pools = (each for report in reports for each in report["pools"])
    own = (each["reclaimable"]["likely"] for each in pools if each["device_uuid"] == row["device_uuid"])
    return sum(each for each in own if each is not None)
