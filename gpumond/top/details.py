"""Details of one process: its shares, its history, its attributes and its verdicts. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from gpumond.model.units import human
from gpumond.top.lines import Line, Piece, wrapped
from gpumond.top.rows import ProcessRow

WITHOUT_AGENT = (
    "this program runs without the agent; start it with gpumond run -- COMMAND to see its shares and flush it"
)
TERM = 11


def described(row: ProcessRow, history: Sequence[Line], width: int) -> list[Line]:
    """Return the lines of the details. ``history``: the lines of its chart, if any."""
    lines: list[Line] = [[Piece(f"{row.program} (pid {row.pid}) on GPU {row.gpu}", "bold")], *history]
    for sentence in row.verdicts:
        lines += wrapped([Piece(sentence, "bold" if row.notable else "")], width)
    shares = [("used", row.used_bytes), *row.shares.items(), ("unmapped", row.unmapped_bytes)]
    holder, kv_cache = row.kv_cache or ("", "")
    more = {holder: f", {kv_cache}"} if kv_cache else {}
    if row.overhead_parts:
        more["overhead"] = f"{more.get('overhead', '')}: {row.overhead_parts}"
    terms = [(share, human(size) + more.get(share, "")) for share, size in shares if size is not None]
    terms += [("user", row.user)] if row.user else []
    for term, value in (*terms, *row.facts):
        lines += wrapped([Piece(f"{term:>{TERM}} ", "dim"), Piece(value)], width)
    if row.flush_policy is None:
        lines += wrapped([Piece(WITHOUT_AGENT)], width)
    return lines
