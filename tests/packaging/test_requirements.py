"""deploy/requirements: the hashes of all packages of the daemon, at the versions in constraints.txt."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
FILES = {
    "daemon": [*(ROOT / "deploy/requirements/daemon.txt").read_text().splitlines()],
    "build": [*(ROOT / "deploy/requirements/build.txt").read_text().splitlines()],
}
PINNED = re.compile(r"([\w.-]+)==(\S+)(?: ; ([^\\]+))? \\")
HASH = re.compile(r" {4}--hash=sha256:[0-9a-f]{64}(?: \\)?")


def versions(lines: list[str]) -> dict[str, str]:
    return {canonicalize_name(found[1]): found[2] for line in lines if (found := PINNED.fullmatch(line))}


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return versions([f"{line.partition(' ;')[0]} \\" for line in lines])


def needed(requirement: Requirement) -> set[str]:
    """Return the names of a package and of all packages that it requires, among those that are installed."""
    found: set[str] = set()
    waiting = [requirement]
    while waiting:
        one = waiting.pop()
        name = canonicalize_name(one.name)
        if name in found:
            continue
        found.add(name)
        try:
            described = [Requirement(text) for text in requires(name) or ()]
        except PackageNotFoundError:
            continue  # for another Python or system
        extras = one.extras or {""}
        waiting += [
            each for each in described if not each.marker or any(each.marker.evaluate({"extra": e}) for e in extras)
        ]
    return found


@pytest.mark.parametrize("name", FILES)
def test_each_package_has_hashes_and_the_version_of_the_constraints(name: str):
    lines = [line for line in FILES[name] if not line.startswith("#")]
    assert [line for line in lines if not (PINNED.fullmatch(line) or HASH.fullmatch(line))] == []
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if PINNED.fullmatch(line):
            assert HASH.fullmatch(following), line
    found = versions(lines)
    assert found
    assert found.items() <= constraints().items()


@pytest.mark.parametrize(("name", "requirement"), [("daemon", "gpumond[daemon,kubernetes]"), ("build", "hatchling")])
def test_file_contains_all_packages_that_are_required(name: str, requirement: str):
    assert needed(Requirement(requirement)) - {"gpumond"} <= versions(FILES[name]).keys()
