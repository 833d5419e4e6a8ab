"""The runbooks of all alerts: the sections of docs/how-to/runbooks.md, of which ``runbooks.md`` is a symbolic link.

A wheel contains the document.
"""

from __future__ import annotations

import re
from pathlib import Path


def sections(document: str) -> tuple[str, dict[str, str]]:
    """Return the introduction, and the Markdown text of each section by its name in lower case."""
    introduction, *parts = re.split(r"^## ", document, flags=re.MULTILINE)
    named = (part.partition("\n") for part in parts)
    return introduction.partition("\n")[2], {name.strip().lower(): text for name, _, text in named}


INTRODUCTION, SECTIONS = sections(Path(__file__).with_name("runbooks.md").read_text("utf-8"))
RUNBOOKS = frozenset(SECTIONS)
"""Alerts with a runbook at ``/docs/runbooks/NAME`` of each daemon."""
