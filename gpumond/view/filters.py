"""The filter of processes. That of the web UI has the same syntax."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from gpumond.view.rows import ProcessRow, pod_of

FIELDS: Mapping[str, Callable[[ProcessRow], object]] = {
    "gpu": lambda row: row.gpu,
    "pid": lambda row: row.pid,
    "program": lambda row: f"{row.program}\n{row.sources.process['comm'] or ''}",
    "user": lambda row: row.user,
    "container": lambda row: row.sources.process["container_name"],
    "pod": lambda row: pod_of(row.sources.process),
    "unit": lambda row: row.sources.process["unit"],
    "job": lambda row: row.sources.process["slurm_job"],
    "verdict": lambda row: row.verdict,
}
"""What a word can be limited to, by name."""
EXACT = ("gpu", "pid")
"""Fields that equal the text after the colon; the others contain it."""
TERM = re.compile(r"(\w+):(.*)")


def matching(rows: Iterable[ProcessRow], words: str) -> list[ProcessRow]:
    """Return the rows that match all words: ``train`` in any text of a row, ``user:root`` in one field, ``-train`` in
    none.
    """
    tests = [_test(word) for word in words.lower().split()]
    return [row for row in rows if all(test(row) for test in tests)]


def _test(word: str) -> Callable[[ProcessRow], bool]:
    negated = len(word) > 1 and word.startswith("-")
    term = word.removeprefix("-") if negated else word
    found = TERM.fullmatch(term)
    name, value = found.groups() if found else ("", "")

    def contains(row: ProcessRow) -> bool:
        if name not in FIELDS:
            return term in row.words
        text = str(FIELDS[name](row) or "").lower()
        if value and name in EXACT:
            return value in (text, text.rpartition(":")[2])
        return value in text

    return lambda row: contains(row) != negated
