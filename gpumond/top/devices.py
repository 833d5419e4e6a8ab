"""The devices on the screen."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text
from textual.app import RenderResult
from textual.containers import VerticalScroll
from textual.widgets import Static

from gpumond.top.ledger import GROUNDS, Line, Piece, picture, promise
from gpumond.top.panel import clipped
from gpumond.top.view import View

STYLES = {"": "", "bold": "bold", "dim": "dim", "alarm": "bold reverse"}


class Devices(VerticalScroll):
    """As high as what it shows, to two fifths of the screen; then it scrolls."""

    DEFAULT_CSS = "Devices { height: auto; max-height: 40%; } Devices Picture { height: auto; }"
    can_focus = False

    def compose(self) -> Iterator[Static]:
        yield Picture()

    def show(self, view: View | None, monochrome: bool) -> None:
        shown = self.query_one(Picture)
        shown.view, shown.monochrome = view, monochrome
        shown.refresh(layout=True)


class Picture(Static):
    view: View | None = None
    monochrome = False

    def render(self) -> RenderResult:
        if self.view is None:
            return Text()
        width, height = self.size.width or self.app.size.width, self.app.size.height
        lines = picture(self.view, width, height, self.monochrome)
        if said := promise(self.view):
            lines.append([Piece(said)])
        return Text("\n").join(clipped(_drawn(line), width) for line in lines)


def _drawn(line: Line) -> Text:
    text = Text()
    for piece in line:
        text.append(piece.text, f"on {GROUNDS[piece.ground]}" if piece.ground else STYLES[piece.look])
    return text
