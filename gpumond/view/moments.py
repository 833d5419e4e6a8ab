"""Who held what at one time of the past, and what changed between two, as ``gpumond history`` shows them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from gpumond.facts.errors import DaemonError
from gpumond.facts.shares import SHARES
from gpumond.facts.units import distinct_size_texts, size_text
from gpumond.view.text import fitting_table, size_or_dash, time_text

NOT_FOUND = 404
VALUES = ("used", *SHARES)
HIDEABLE = (">UNATTRIBUTED", ">OPAQUE", ">OVERHEAD", ">PEAK", "ENDED", ">PID", ">STRANDED", ">LIVE", ">CACHED")
NO_PROGRAM = "no such program used memory then"
Entry = dict[str, Any]


def rounded_bytes(value: float | None) -> int | None:
    return None if value is None else round(value)


def known_shares(entries: Sequence[Entry]) -> list[str]:
    """Return the shares that an entry has."""
    return [share for share in SHARES if any(entry[f"{share}_bytes"] is not None for entry in entries)]


def share_columns(entries: Sequence[Entry]) -> Iterator[str]:
    return (f">{share.upper()}" for share in known_shares(entries))


def holdings_at(
    get: Callable[[str], Any], at: float, uuid: str | None = None, names: Collection[str] = ()
) -> list[Entry]:
    """Return what each GPU and each program held at a time, by GPU, the largest first. ``get`` asks the daemon.

    ``uuid`` and ``names`` select one GPU, and programs. Raises DaemonError.
    """
    query = {"at": at} | ({} if uuid is None else {"uuid": uuid})
    try:
        found = get(f"/api/v1/history/moment?{urlencode(query)}")["holdings"]
    except DaemonError as error:
        if error.status != NOT_FOUND:
            raise
        what = f"no history for {time_text(at)}; choose a later time, after the daemon's start and within the last day"
        raise DaemonError(what, NOT_FOUND) from None
    entries = [
        {"at": at, **holding, **{f"{each}_bytes": rounded_bytes(holding[f"{each}_bytes"]) for each in VALUES}}
        for holding in found
        if not names or {str(holding["pid"]), holding["name"]} & {*names}
    ]
    return sorted(entries, key=_order)


def _order(entry: Entry) -> tuple[str, bool, int]:
    return entry["device_uuid"], entry["pid"] is None, -entry["used_bytes"]


def table_at(
    times: Sequence[str], moments: Sequence[Sequence[Entry]], gpus: Mapping[str, str], width: int | None
) -> str:
    """Return a table of who held what at one time, or of what changed between two. ``gpus``: names by UUID."""
    if not any(moments):
        return NO_PROGRAM
    if len(moments) > 1:
        title = f"from {times[0]} to {times[1]} (BEFORE and AFTER: used memory; other columns: changes):"
        return f"{title}\n{_changes(moments[0], moments[1], gpus, width)}"
    entries = moments[0]
    ended = any(entry["ended_at"] for entry in entries)
    header = ("GPU", ">PID", "PROGRAM", ">USED", *share_columns(entries), *(["ENDED"] if ended else []))
    rows = [
        [
            *_subject_cells(entry, gpus),
            size_or_dash(entry["used_bytes"]),
            *(size_or_dash(entry[f"{share}_bytes"]) for share in known_shares(entries)),
            *([time_text(entry["ended_at"])] if ended else []),
        ]
        for entry in entries
    ]
    return f"at {times[0]}:\n{history_table(header, rows, width)}"


def _subject_cells(entry: Entry, gpus: Mapping[str, str]) -> list[str]:
    gpu = gpus.get(entry["device_uuid"], "-")
    return [gpu, "", "whole GPU"] if entry["pid"] is None else [gpu, str(entry["pid"]), entry["name"] or "-"]


def history_table(header: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> str:
    return fitting_table(header, rows, width, HIDEABLE, "gpumond history --csv")


def _changes(before: Sequence[Entry], after: Sequence[Entry], gpus: Mapping[str, str], width: int | None) -> str:
    """Return a table of what changed between two times: the used bytes, and each share's change."""
    shares = known_shares([*before, *after])
    old, new = ({_key(entry): entry for entry in entries} for entries in (before, after))
    header = ("GPU", ">PID", "PROGRAM", ">BEFORE", ">AFTER", ">CHANGE", *(f">{share.upper()}" for share in shares))
    rows = [
        [
            *_subject_cells(new.get(key, old.get(key, {})), gpus),
            *_used(*(entries[key]["used_bytes"] if key in entries else None for entries in (old, new))),
            *(_change(old.get(key), new.get(key), name) for name in ("used", *shares)),
        ]
        for key in map(_key, sorted((old | new).values(), key=_order))
    ]
    return history_table(header, rows, width)


def _used(before: int | None, after: int | None) -> tuple[str, str]:
    return (
        (size_or_dash(before), size_or_dash(after))
        if before is None or after is None
        else distinct_size_texts(before, after)
    )


def _key(entry: Entry) -> tuple[str, int | None, int | None]:
    return entry["device_uuid"], entry["pid"], entry["start_ticks"]


def _change(before: Entry | None, after: Entry | None, name: str) -> str:
    """Return how much a share changed: all shares add up to the used bytes, so one that isn't listed is 0."""
    old, new = (0 if entry is None else entry[f"{name}_bytes"] or 0 for entry in (before, after))
    return "0 B" if new == old else f"{'+' if new > old else '-'}{size_text(abs(new - old))}"
