"""A panel of text in front of the screen."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Footer, Static


def clipped(text: Text, width: int) -> Text:
    """Return the text on one line, shortened to ``width``."""
    text.truncate(max(1, width), overflow="ellipsis")
    return text


def keys() -> Footer:
    """Return a compact footer of the key bindings."""
    footer = Footer(show_command_palette=False)
    footer.compact = True
    return footer


class Panel(ModalScreen[None]):
    """A panel that scrolls with the arrow keys."""

    DEFAULT_CSS = """
    Panel { align: center middle; }
    Panel VerticalScroll { width: 95%; max-width: 110; height: auto; max-height: 90%; border: round $primary;
                           padding: 0 1; background: $surface; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "dismiss", "Close", key_display="esc")]

    def __init__(self) -> None:
        super().__init__()
        self._text = Static(markup=False)

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield self._text
        yield keys()

    def set_text(self, text: Text) -> None:
        """Set the text. May be called at any time, also before the panel is mounted."""
        self._text.update(text)

    @property
    def width(self) -> int:
        """Width of the text in columns."""
        return self._text.size.width
