"""Sanitising of untrusted text for a terminal. Pure."""

from __future__ import annotations


def plain(text: object, most: int = 200) -> str:
    """Return untrusted text as one line of at most ``most`` characters, with a replacement for each character that
    could change the terminal or the adjacent text (control characters, escapes, direction marks, surrogates)."""
    cut = str(text)[: most + 1]
    safe = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in cut)
    return safe if len(safe) <= most else safe[: most - 1] + "\N{HORIZONTAL ELLIPSIS}"
