"""Fills the figures of documents from the result files of benchmarks: ``make docs``.

A document contains the text with fields in a comment, and after it the text with their values:

    <!-- figures
    A scrape takes {scrape[8x64][further_scrapes_gzip][p50_ms]:.1f} ms.
    -->

    A scrape takes 0.5 ms.

    <!-- end of figures -->

``<!-- figures tools/docs/readme_figures.md -->`` names a file with the text. A field is a file of ``bench/results``,
the keys of its figures in brackets, a unit as an attribute (``UNITS``) and a format. The key ``each`` turns a mapping
into a list. A list has the keys ``min``, ``median``, ``max``, ``sum`` and ``count``; another key, not a number, is
looked up in each of its elements. A name of ``TABLES`` is the text that a function makes of a result file.
"""

from __future__ import annotations

import json
import re
import statistics
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.tables import memory_ratio, peers_table

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
FIGURES_BLOCK = re.compile(r"<!-- figures(?:\n(.*?)\n| (\S+) )-->\n.*?<!-- end of figures -->", re.DOTALL)
WIDTH = 120
UNITS = {
    "percent": 100.0,
    "MiB": 2**-20,
    "MB": 1e-6,
    "kB": 1e-3,
    "seconds": 1e-3,
    "minutes": 1 / 60,
    "GiB_of_MiB": 2**-10,
}
"""Factors: ``seconds`` for milliseconds, ``minutes`` for seconds, ``GiB_of_MiB`` for MiB, the others for bytes and
ratios."""
LIST_FUNCTIONS: Mapping[str, Callable[[list[Any]], float]] = {
    "min": min,
    "median": statistics.median,
    "max": max,
    "sum": sum,
    "count": len,
}
TABLES: Mapping[str, tuple[str, str, Callable[[Mapping[str, Any]], str]]] = {
    "peers_table": ("peers", "bench.peers", peers_table),
    "peers_card_table": ("peers_card", "bench.peers --card 48", peers_table),
    "peers_memory": ("peers", "bench.peers", memory_ratio),
}
"""The result file, the command and the function of each text."""


class Figure:
    """A value of a result file, as ``str.format`` reads it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __getitem__(self, key: str | int) -> Figure:
        if not isinstance(self.value, list):
            return Figure(list(self.value.values()) if key == "each" else self.value[str(key)])
        if isinstance(key, int):
            return Figure(self.value[key])
        return Figure(
            LIST_FUNCTIONS[key](self.value)
            if key in LIST_FUNCTIONS
            else [each[key] for each in self.value if key in each]
        )

    def __getattr__(self, unit: str) -> Figure:
        return Figure(UNITS[unit] * self.value)

    def __format__(self, form: str) -> str:
        if isinstance(self.value, dict | list):
            raise TypeError(f"{str(self.value)[:60]} isn't a single figure; add keys in brackets")
        return format(self.value, form)


class Results(dict[str, Any]):
    """Figures by the name of their file, and tables."""

    def __missing__(self, name: str) -> Any:
        if name in TABLES:
            return table_text(name)
        self[name] = Figure(figures(name))
        return self[name]


def figures(file: str) -> Any:
    return json.loads((RESULTS / f"{file}.json").read_text())["figures"]


def table_text(name: str) -> str:
    """Return a table, or a line that states how to measure it if there is no result file."""
    file, command, make_text = TABLES[name]
    if not (RESULTS / f"{file}.json").exists():
        return f"No result is stored. `python -m {command} --save` measures it."
    return make_text(figures(file))


def fill_figures(text: str) -> str:
    """Return a document with the current figures."""
    results = Results()

    def replaced_block(match: re.Match[str]) -> str:
        source = match[1] or (ROOT / match[2]).read_text().strip()
        comment = f"\n{match[1]}\n" if match[1] else f" {match[2]} "
        return f"<!-- figures{comment}-->\n\n{wrap(source.format_map(results))}\n\n<!-- end of figures -->"

    return FIGURES_BLOCK.sub(replaced_block, text)


def wrap(text: str) -> str:
    """Return paragraphs and items of lists in lines of normal length; a table is not changed."""
    parts = re.split(r"\n(?=- )|\n(?=\n)|(?<=\n)\n", text)
    return "\n".join(part if part.startswith("|") else _fill(part) for part in parts)


def _fill(part: str) -> str:
    indent = "  " * part.startswith("- ")
    text = re.sub("`[^`]*`", lambda code: code[0].replace(" ", "\0"), " ".join(part.split()))
    lines = textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return lines.replace("\0", " ")


def outdated_documents() -> Iterator[tuple[Path, str]]:
    """Yield each document that differs from its result files, and its current text."""
    for path in DOCUMENTS:
        text = path.read_text()
        if (current := fill_figures(text)) != text:
            yield path, current


def main() -> None:
    for path, text in outdated_documents():
        path.write_text(text)


if __name__ == "__main__":
    main()
