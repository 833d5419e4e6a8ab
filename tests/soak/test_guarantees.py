"""Each guarantee of ``tests/guarantees.yaml``: the tests that it names fail without the code that makes it true.

A mutation replaces one text of one file in a copy of the tree. The named test passes before, and fails after it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.guarantees import MUTATIONS, ROOT, Mutation

PASSED, FAILED = 0, 1
SECONDS, TEST_SECONDS = 280, 100
"""Of all tests of a mutation, and of one: some wait for ever without the code that they test."""


@pytest.fixture(scope="module")
def copy() -> Iterator[Path]:
    """Copy of the tree that every user can read, since some tests run programs of other users."""
    place = Path(tempfile.mkdtemp(prefix="gpumond-"))
    place.chmod(0o755)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, place / name)
    yield place
    shutil.rmtree(place)


@pytest.fixture(scope="module")
def passed(copy: Path) -> dict[str, str]:
    """The output of the tests that have passed in the copy without a mutation."""
    return {}


def run(copy: Path, test: str) -> tuple[int, str]:
    environ = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    options = ["-q", "-x", "-rs", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "", "--timeout", str(TEST_SECONDS)]
    command = [sys.executable, "-m", "pytest", *options, test]
    done = subprocess.run(command, cwd=copy, env=environ, capture_output=True, text=True, timeout=SECONDS)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.soak
@pytest.mark.timeout(2 * SECONDS + 20)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_guarantee_is_proved_by_its_test(mutation: Mutation, copy: Path, passed: dict[str, str]):
    if mutation.test not in passed:
        code, passed[mutation.test] = run(copy, mutation.test)
        assert code == PASSED, passed[mutation.test]
    if "skipped" in passed[mutation.test] and " passed" not in passed[mutation.test]:
        pytest.skip(passed[mutation.test].splitlines()[-2])
    path = copy / mutation.path
    original = path.read_text()
    path.write_text(mutation.applied(original))
    try:
        code, output = run(copy, mutation.test)
    finally:
        path.write_text(original)
    assert code == FAILED, f"{mutation.test} does not notice that {mutation.guarantee!r} is untrue:\n{output}"
