"""Notices of the daemons and of the connections to them, as lines. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from gpumond.view.lines import Line, Piece, clipped, wrapped
from gpumond.view.machine import View
from gpumond.view.notices import FrameNotice, grouped

STYLES = {"bad": "bad", "warn": "warn", "note": ""}


def remarks(view: View | None, connections: Iterable[FrameNotice]) -> Iterator[FrameNotice]:
    """Yield all notices, those about the connections first."""
    yield from connections
    if view is None:
        return
    yield from view.notices
    yield from (replace(alert, title=f"alert {alert.title}") for alert in view.alerts)
    yield from view.verdicts
    yield from view.stuck
    if view.processes and not view.agents:
        yield FrameNotice("note", "no program runs the agent", "start one with gpumond run -- python YOUR_PROGRAM.py")
    elif view.up and view.devices and not view.processes:
        yield FrameNotice("note", "no process uses a device", "")


def remark_lines(notices: Iterable[FrameNotice], width: int, rows: int) -> list[Line]:
    """Return the notices in at most ``rows`` lines, one for each kind."""
    groups = grouped(notices)
    lines = [clipped(_summary(group), width) for group in groups]
    if len(lines) > rows:
        hidden = sum(map(len, groups[max(0, rows - 1) :]))
        lines[max(0, rows - 1) :] = [[Piece(f"{hidden} more: press a")]] if rows else []
    return lines


def _summary(group: Sequence[FrameNotice]) -> Line:
    first = group[0]
    if len(group) == 1:
        return _line(first)
    return [Piece(f"{first.kind} ({len(group)})", STYLES[first.level]), Piece(f": {first.text or first.title}, …")]


def _line(notice: FrameNotice) -> Line:
    return [Piece(notice.title, STYLES[notice.level]), Piece(f": {notice.text}" if notice.text else "")]


def remarks_in_full(notices: Iterable[FrameNotice], width: int) -> list[Line]:
    """Return all notices by kind, with their complete texts."""
    lines: list[Line] = []
    for group in grouped(notices):
        lines += [[]] if lines else []
        for notice in group:
            lines += wrapped(_line(notice), width)
    return lines or [[Piece("no alerts, verdicts or problems")]]
