"""User-facing text contains no word that the glossary rejects."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpumond

PACKAGE = Path(gpumond.__file__).parent
ROOT = PACKAGE.parent
REJECTED = re.compile(
    r"\b(anew|told|tells?|mends?|mended|let(s)? go of|who is told|wants|beside|whoever|nobody|somebody"
    r"|gpu id|cards?|a stranger'?s?|strangers?|whose turn|judge[sd]?|rehears\w+|under way|set aside|give[ns]? back)\b",
    re.IGNORECASE,
)
DOCUMENTS = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *(path for path in sorted((ROOT / "docs").rglob("*.md"))),
    ROOT / "grafana" / "README.md",
    *(path for path in sorted((PACKAGE / "api/page").iterdir()) if path.suffix in (".html", ".js")),
)
CODES = re.compile(
    r"```.*?```|`[^`]*`|<!-- figures.*?-->|--card|card\.json|^\s*(SELECT|INSERT|DELETE|CREATE)\b.*", re.DOTALL
)
"""Text that is not prose: code, fields of figures, an option, a file and SQL."""


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """String literals of a module that are neither docstrings nor parts of comparisons with a wire format."""
    tree = ast.parse(path.read_text())
    documentation = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    documentation |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.lineno, node.value


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_messages_use_the_glossary(path: Path):
    assert not [(line, text) for line, text in texts(path) if " " in text and REJECTED.search(CODES.sub("", text))]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documentation_uses_the_glossary(path: Path):
    found = [line for line in CODES.sub("", path.read_text()).splitlines() if REJECTED.search(line)]
    if path.name == "CONTRIBUTING.md":  # the list of rejected words itself
        found = [line for line in found if not line.startswith(("Do not use", 'of "lives"'))]
    assert not found
