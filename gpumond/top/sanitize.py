"""Text from strangers, for a terminal. Pure."""

from __future__ import annotations


def plain(text: object, most: int = 200) -> str:
    """Text from strangers, safe to show: one line, at most ``most`` characters, without what changes a terminal or
    how the text beside it reads (control characters, escapes, marks of direction, surrogates)."""
    cut = str(text)[: most + 1]
    safe = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in cut)
    return safe if len(safe) <= most else safe[: most - 1] + "\N{HORIZONTAL ELLIPSIS}"
