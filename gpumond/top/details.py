"""One process in full: its shares, its history, its attributes and its verdicts."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType

from gpumond.model.units import human
from gpumond.top.history import HistoryChart, drawn
from gpumond.top.panel import Panel
from gpumond.top.rows import ProcessLife, ProcessRow
from gpumond.top.view import View

CURVE_ROWS = 4


class Details(Panel):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f", "app.flush", "Flush"),
        Binding("enter", "dismiss", show=False),
    ]

    def __init__(self, key: ProcessLife) -> None:
        super().__init__()
        self.key = key

    def show(self, view: View | None, past: HistoryChart | None) -> None:
        row = next((row for row in view.processes if row.key == self.key), None) if view else None
        if row is None:
            self.say(Text(f"pid {self.key[1].pid} no longer uses a device"))
        else:
            self.say(described(row, past, max(20, self.width)))


def described(row: ProcessRow, past: HistoryChart | None, width: int) -> Text:
    text = Text().append(f"{row.program} (pid {row.pid}) on GPU {row.gpu}\n", "bold")
    if past is not None and past.of == row.key:
        text.append_text(drawn(past, "", width, CURVE_ROWS)).append("\n")
    for sentence in row.verdicts:
        text.append(f"{sentence}\n", "bold" if row.notable else "")
    shares = [("used", row.used_bytes), *row.shares.items()]
    terms = [(share, human(size)) for share, size in shares if size is not None]
    terms += [("user", row.user)] if row.user else []
    for term, value in (*terms, *row.facts):
        text.append(f"{term:>11} ", "dim").append(f"{value}\n")
    if row.flush_policy is None:
        text.append(
            "this program runs without the agent; start it with gpumond run -- COMMAND to see its shares and flush it\n"
        )
    text.rstrip()
    return text
