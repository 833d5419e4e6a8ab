"""Counts "of" and "you" per 1,000 words in README, tutorials, how-to guides and help: ``python -m tools.docs.wording``.

The targets are at most 20 "of" and at least 8 "you". The counts are printed, and none of them fails a build. Tables,
code, headings, links' addresses and the sources of figures are not counted.
"""

from __future__ import annotations

import re
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
MAX_OF = 20
MIN_YOU = 8
NOT_TEXT = re.compile(r"<!--.*?-->|^ *```.*?^ *```|^ *\|.*?$|^#.*?$|^ *-{3,}$|^\.[A-Z].*?$", re.DOTALL | re.MULTILINE)
ADDRESS = re.compile(r"\]\([^)]*\)")
CODE = re.compile(r"`[^`]*`")


def running_words(text: str) -> list[str]:
    """Words of the running text, in lower case; a piece of code in a sentence is one word."""
    running = CODE.sub("x", ADDRESS.sub("]", NOT_TEXT.sub("", text)))
    return re.findall(r"[a-z]+(?:'[a-z]+)?", running.lower())


def row(name: str, *texts: str) -> str:
    """Return the number of words, and "of" and "you" (or "your", "you'll") per 1,000 of them."""
    words = [word for text in texts for word in running_words(text)]
    count = max(len(words), 1)
    you_count = sum(word.partition("'")[0] in ("you", "your", "yours") for word in words)
    return f"{name:56}{len(words):>8}{words.count('of') * 1000 / count:>8.1f}{you_count * 1000 / count:>8.1f}"


def document(pages: bool = False) -> str:
    """Return the table of counts by group, with a row for each page if ``pages``."""
    lines = [f"{'':56}{'words':>8}{'of':>8}{'you':>8}"]
    for group, patterns in GROUPS.items():
        texts = {path: path.read_text() for pattern in patterns for path in sorted(ROOT.glob(pattern))}
        lines.append(row(group, *texts.values()))
        if pages:
            lines += [row(f"  {path.relative_to(ROOT)}", text) for path, text in texts.items()]
    lines.append(row("help", man.document()))
    lines.append(f'targets for README, tutorials, how-to guides and help: "of" <= {MAX_OF}, "you" >= {MIN_YOU}')
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    import sys

    sys.stdout.write(document(pages="--pages" in sys.argv))
