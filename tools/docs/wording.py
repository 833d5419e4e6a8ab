"""Counts "of" and "you" per 1,000 words in README, tutorials, how-to guides and help: ``python -m tools.docs.wording``.

The targets are at most 20 "of" and at least 8 "you". The counts are printed, and none of them fails a build. Tables,
code, headings, links' addresses and the sources of figures are not counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tools.docs import man

ROOT = Path(__file__).resolve().parents[2]
GROUPS = {
    "README": ("README.md",),
    "tutorials": ("docs/tutorial/*.md",),
    "how-to guides": ("docs/how-to/**/*.md",),
    "explanation": ("docs/explanation/*.md",),
    "reference": ("docs/reference/*.md",),
    "contributing": ("CONTRIBUTING.md", "docs/contributing/**/*.md"),
}
MOST_OF = 20
LEAST_YOU = 8
LEFT_OUT = re.compile(r"<!--.*?-->|^ *```.*?^ *```|^ *\|.*?$|^#.*?$|^ *-{3,}$|^\.[A-Z].*?$", re.DOTALL | re.MULTILINE)
ADDRESS = re.compile(r"\]\([^)]*\)")
CODE = re.compile(r"`[^`]*`")


def words(text: str) -> list[str]:
    """Words of the running text, in lower case; a piece of code in a sentence is one word."""
    running = CODE.sub("x", ADDRESS.sub("]", LEFT_OUT.sub("", text)))
    return re.findall(r"[a-z]+(?:'[a-z]+)?", running.lower())


def frequencies(text: str) -> tuple[int, float, float]:
    """Return the number of words, and "of" and "you" (or "your", "you'll") per 1,000 of them."""
    found = words(text)
    number = max(len(found), 1)
    you = sum(word.partition("'")[0] in ("you", "your", "yours") for word in found)
    return len(found), found.count("of") * 1000 / number, you * 1000 / number


def files(patterns: tuple[str, ...]) -> Iterator[Path]:
    for pattern in patterns:
        yield from sorted(ROOT.glob(pattern))


def document(pages: bool = False) -> str:
    """Return the table of counts by group, with a row for each page if ``pages``."""
    rows = [("", "words", "of", "you")]
    for group, patterns in GROUPS.items():
        texts = {path: path.read_text() for path in files(patterns)}
        rows.append(row(group, "\n".join(texts.values())))
        if pages:
            rows += [row(f"  {path.relative_to(ROOT)}", text) for path, text in texts.items()]
    rows.append(row("help", man.document()))
    lines = [f"{name:44}{number:>8}{of:>8}{you:>8}" for name, number, of, you in rows]
    lines.append(f'targets for README, tutorials, how-to guides and help: "of" <= {MOST_OF}, "you" >= {LEAST_YOU}')
    return "\n".join(lines) + "\n"


def row(name: str, text: str) -> tuple[str, str, str, str]:
    number, of, you = frequencies(text)
    return name, str(number), f"{of:.1f}", f"{you:.1f}"


if __name__ == "__main__":
    import sys

    sys.stdout.write(document(pages="--pages" in sys.argv))
