"""Every fault and condition in the code has one line of remedy, and a row in docs/how-to/troubleshoot.md."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import gpumond
from gpumond.model.remedies import CONDITIONS, FAULTS, OF_A_RETURN_CODE, remedy
from tests.model.test_conditions import test_what_bounds_the_truth_about_a_device_is_named as conditions_table

PACKAGE = Path(gpumond.__file__).parent
ROWS = [
    line
    for line in (PACKAGE.parent / "docs/how-to/troubleshoot.md").read_text().splitlines()
    if line.startswith("| ") and line.count("|") >= 4
]
STATES_KIND = {"Fault": 1, "SourceUnavailable": 0, "Failed": 0, "Lost": 0, "add": 1, "lose": 1}
"""Which argument of these calls is a fault's kind."""


def stated() -> Iterator[tuple[str, str]]:
    """Every kind that is written in the code, as text or by the name of a constant, and where."""
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(("gpumond", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
        if not module.startswith(("gpumond.agent", "gpumond.loadgen")):
            for node in ast.walk(ast.parse(path.read_text())):
                yield from ((kind, f"{module}:{node.lineno}") for kind in _kinds(node, module))


def _kinds(node: ast.AST, module: str) -> Iterator[str]:
    if not isinstance(node, ast.Call):
        return
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    place = STATES_KIND.get(name)
    values = [keyword.value for keyword in node.keywords if keyword.arg == "reason" and name == "_become"]
    values += [node.args[place]] if place is not None and len(node.args) > place else []
    for value in values:
        if isinstance(value, ast.Constant) and isinstance(value.value, str) and value.value:
            yield value.value
        elif isinstance(value, ast.Name) and value.id.isupper():
            yield getattr(import_module(module), value.id)


def test_every_fault_that_the_code_states_has_a_mend():
    known = dict(stated())
    assert {"timeout", "left_out", "impossible_value", "no_driver", "processes_hidden", "corrupt", "released"} <= set(
        known
    )
    assert {kind: where for kind, where in known.items() if kind not in FAULTS} == {}


def test_every_condition_has_a_mend_and_no_mend_is_left_over():
    tested = {kind for mark in conditions_table.pytestmark for _, kinds in mark.args[1] for kind in kinds}
    assert tested | {"private_pid_namespace"} == set(CONDITIONS)


@pytest.mark.parametrize("kind", [*FAULTS, *CONDITIONS])
def test_a_mend_is_one_line_that_says_what_to_do(kind: str):
    assert remedy(kind)
    assert len(remedy(kind)) <= 240
    assert not remedy(kind).endswith(".")
    assert "\n" not in remedy(kind)


@pytest.mark.parametrize("kind", [*FAULTS, *CONDITIONS])
def test_the_operations_manual_has_a_row_for_each(kind: str):
    assert any(f'"{kind}"' in row or f"`{kind}`" in row for row in ROWS), kind


def test_a_return_code_that_has_none_of_its_own_is_explained():
    assert remedy("corrupted_inforom") == OF_A_RETURN_CODE
