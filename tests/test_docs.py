"""Documents: relative links and anchors resolve, the site builds, and the code tour names existing functions."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote

import pytest

from gpumond.commands.main import commands
from gpumond.config.loading import load_settings
from gpumond.config.settings import SettingsConfig
from tools.docs import wording

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "grafana/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
TOUR = ROOT / "docs/contributing/code-tour.md"
BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PLACE = re.compile(r"`((?:gpumond|tests|bench)/[\w/]+\.py):([\w.]+)`")


def prose(path: Path) -> str:
    return BLOCK.sub("", path.read_text())


def anchors(path: Path) -> set[str]:
    """Anchors of the headings, by the rule that GitHub and the site share."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#+ (.*?)\s*$", prose(path), re.MULTILINE):
        text = LINK.sub("", heading.replace("`", ""))
        name = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found


def broken(path: Path) -> Iterator[str]:
    for link in LINK.findall(re.sub(r"`[^`]*`", "", prose(path))):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = unquote(link).partition("#")
        target = (path.parent / name).resolve() if name else path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield link


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_anchors_resolve(path: Path):
    assert list(broken(path)) == []


def test_broken_link_or_anchor_is_found(tmp_path: Path):
    path = tmp_path / "document.md"
    path.write_text("# One title\n[a](#one-title) [b](#another) [c](missing.md) [d](https://example.com/x)\n")
    assert list(broken(path)) == ["#another", "missing.md"]


@pytest.mark.skipif(find_spec("mkdocs") is None, reason="needs MkDocs (pip install -e '.[dev]')")
def test_site_builds_without_a_warning(tmp_path: Path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "contributing/code-tour.html").exists()


@pytest.mark.parametrize("page", ["commands", "configuration", "plugins", "responses", "verdicts"])
def test_generated_pages_are_current(page: str):
    document = import_module(f"tools.docs.{page}").document()
    assert (ROOT / f"docs/reference/{page}.md").read_text() == document, "run `make docs`"


def test_manual_page_is_current():
    document = import_module("tools.docs.man").document()
    assert (ROOT / "deploy/man/gpumond.1").read_text() == document, "run `make docs`"


@pytest.mark.needs("man")
def test_manual_page_is_rendered_without_a_warning():
    command = ["man", "--warnings", "--local-file", ROOT / "deploy/man/gpumond.1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == ""
    for command in commands():
        assert f"gpumond {command}" in done.stdout


def test_configuration_page_describes_every_setting():
    page = (ROOT / "docs/reference/configuration.md").read_text()
    for name, field in SettingsConfig.model_fields.items():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        assert field.description
        assert field.description in row


def test_configuration_example_is_valid(tmp_path: Path):
    page = (ROOT / "docs/reference/configuration.md").read_text()
    file = tmp_path / "gpumond.yaml"
    file.write_text(page.split("```yaml\n")[1].split("```")[0])
    assert load_settings(file, environ={}).rules


def definitions(path: Path) -> set[str]:
    """Functions, classes and constants of a module; methods as ``Class.method``."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            members = [n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
            found |= {f"{node.name}.{member.name}" for member in members}
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def test_code_tour_names_functions_that_exist():
    places = PLACE.findall(TOUR.read_text())
    assert len(places) >= 20
    assert [f"{path}:{name}" for path, name in places if name not in definitions(ROOT / path)] == []


def test_words_are_counted_in_running_text_only():
    text = "# Use of it\n\nYou'll see `a of b` of [yours](of.md).\n\n```\nof\n```\n\n| of |\n|---|\n"
    assert wording.running_words(text) == ["you'll", "see", "x", "of", "yours"]
    assert wording.row("page", text).split() == ["page", "5", "200.0", "400.0"]
