"""The panel that sends a signal to one's own programs, after a confirmation."""

from __future__ import annotations

from collections.abc import Sequence

from gpumond.top.lines import Line, Piece, wrapped
from gpumond.top.local import SIGNALS, refusal, send
from gpumond.top.panels import Hints, Panel
from gpumond.top.rows import ProcessRow


class SignalPanel(Panel):
    """The panel. ``rows``: processes, and whether their daemon may be on this machine. ``y`` sends the signal."""

    closing = ("escape", "q", "n")

    def __init__(self, rows: Sequence[tuple[ProcessRow, bool]]) -> None:
        super().__init__()
        self.rows = rows
        self.signal = 0
        self.results = [refusal(row, local) for row, local in rows]
        self.ready = not all(self.results)

    @property
    def hints(self) -> Hints:
        return (("←→", "Signal"), ("y", "Yes, send"), ("esc", "No")) if self.ready else super().hints

    def press(self, key: str) -> None:
        if not self.ready:
            return
        if key in ("left", "right"):
            self.signal = (self.signal + (1 if key == "right" else -1)) % len(SIGNALS)
        elif key == "y":
            self.ready = False
            self.results = [send(row, local, SIGNALS[self.signal]) for row, local in self.rows]

    def lines(self, width: int) -> list[Line]:
        lines: list[Line] = []
        if self.ready:
            names = [Piece(f" {name} ", "chosen" if at == self.signal else "") for at, name in enumerate(SIGNALS)]
            lines += [names, []]
        for (row, _), result in zip(self.rows, self.results, strict=True):
            text = f": {'no signal: ' if self.ready else ''}{result}" if result else ""
            lines += wrapped([Piece(f"{row.program} (pid {row.pid})", "bold"), Piece(text)], width)
        if self.ready:
            count = self.results.count("")
            programs = "1 program" if count == 1 else f"{count} programs"
            lines += [[], [Piece(f"Send {SIGNALS[self.signal]} to {programs}? y: yes  esc: no", "bold")]]
        return lines
