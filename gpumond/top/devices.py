"""Widgets that show the devices."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text
from textual.app import RenderResult
from textual.containers import VerticalScroll
from textual.widgets import Static

from gpumond.top.ledger import GROUNDS, Line, Piece, device_lines, flush_estimate
from gpumond.top.panel import clipped
from gpumond.top.view import View

STYLES = {"": "", "bold": "bold", "dim": "dim", "alarm": "bold reverse", "chosen": "bold reverse"}


class Devices(VerticalScroll):
    """The list of devices. It takes at most two fifths of the screen, then it scrolls."""

    DEFAULT_CSS = "Devices { height: auto; max-height: 40%; } Devices DeviceDisplay { height: auto; }"
    can_focus = False

    def __init__(self) -> None:
        super().__init__()
        self.display_widget = DeviceDisplay()

    def compose(self) -> Iterator[Static]:
        yield self.display_widget

    def show(self, view: View | None, monochrome: bool, chosen: str | None) -> None:
        shown = self.display_widget  # the widget may not be mounted
        moved = shown.chosen != chosen
        shown.view, shown.monochrome, shown.chosen = view, monochrome, chosen
        shown.refresh(layout=True)
        if moved:
            self.call_after_refresh(self._reveal)

    def _reveal(self) -> None:
        """Scroll to the selected device."""
        marked = (at for at, line in enumerate(self.display_widget.lines()) if line and line[0].style == "chosen")
        self.scroll_to(y=next(marked, 0), animate=False)


class DeviceDisplay(Static):
    view: View | None = None
    monochrome = False
    chosen: str | None = None

    def render(self) -> RenderResult:
        return Text("\n").join(clipped(_drawn(line), self._width) for line in self.lines())

    def lines(self) -> list[Line]:
        if self.view is None:
            return []
        lines = device_lines(self.view, self._width, self.app.size.height, self.monochrome, self.chosen)
        if estimate := flush_estimate(self.view):
            lines.append([Piece(estimate)])
        return lines

    @property
    def _width(self) -> int:
        return self.size.width or self.app.size.width


def _drawn(line: Line) -> Text:
    text = Text()
    for piece in line:
        text.append(piece.text, f"on {GROUNDS[piece.ground]}" if piece.ground else STYLES[piece.style])
    return text
