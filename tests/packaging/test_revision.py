"""The commit of a build or of a checkout, as `gpumond --version` and the metrics state it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gpumond

pytestmark = pytest.mark.needs("git")
SHOW = "import gpumond; print(gpumond.revision())"


def git(directory: Path, *arguments: str) -> str:
    options = ("-c", "user.name=tests", "-c", "user.email=tests@example.com", "-c", "init.defaultBranch=main")
    done = subprocess.run(["git", *options, *arguments], cwd=directory, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def shown(directory: Path) -> str:
    environ = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
    command = [sys.executable, "-c", SHOW]
    return subprocess.run(
        command, cwd=directory, env=environ, capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    directory = tmp_path / "checkout"
    (directory / "gpumond").mkdir(parents=True)
    shutil.copy(gpumond.__file__, directory / "gpumond")
    git(directory, "init")
    git(directory, "add", ".")
    git(directory, "commit", "-m", "one")
    return directory


def test_revision_of_a_checkout_is_its_commit(checkout: Path, tmp_path: Path):
    commit = git(checkout, "rev-parse", "HEAD")
    assert shown(checkout) == commit
    git(checkout, "worktree", "add", "-b", "side/branch", str(tmp_path / "worktree"))
    git(tmp_path / "worktree", "commit", "--allow-empty", "-m", "two")
    assert shown(tmp_path / "worktree") == git(tmp_path / "worktree", "rev-parse", "HEAD") != commit
    git(checkout, "pack-refs", "--all")
    assert shown(checkout) == commit
    git(checkout, "checkout", "--detach")
    assert shown(checkout) == commit


def test_revision_of_a_build_is_stated_by_its_file(checkout: Path):
    (checkout / "gpumond" / "REVISION").write_text("c0ffee-modified\n")
    assert shown(checkout) == "c0ffee-modified"


@pytest.mark.parametrize("content", [None, b"", b"gitdir: /nowhere", b"\xff"])
def test_revision_without_a_repository_is_empty(checkout: Path, content: bytes | None):
    shutil.rmtree(checkout / ".git")
    if content is not None:
        (checkout / ".git").write_bytes(content)
    assert shown(checkout) == ""
