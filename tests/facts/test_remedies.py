"""Remedies: one line for every kind of fault, condition and verdict, and a row in docs/reference/faults.md."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

import gpumond
from gpumond.facts.errors import CONDITION_REMEDIES, FAULT_REMEDIES, RETURN_CODE_REMEDY, FaultKind, remedy
from gpumond.facts.verdicts import VERDICT_KINDS, VerdictName

ROWS = [
    line
    for line in (Path(gpumond.__file__).parents[1] / "docs/reference/faults.md").read_text().splitlines()
    if line.startswith("| ") and line.count("|") >= 4
]


def test_remedies_of_faults_cover_every_kind():
    assert sorted(FAULT_REMEDIES) == sorted(get_args(FaultKind))


def test_every_kind_of_verdict_has_a_record():
    assert tuple(kind.name for kind in VERDICT_KINDS) == get_args(VerdictName)


@pytest.mark.parametrize("kind", [*FAULT_REMEDIES, *CONDITION_REMEDIES])
def test_remedy_is_one_line_with_the_next_step(kind: str):
    assert remedy(kind)
    assert "\n" not in remedy(kind)


@pytest.mark.parametrize("kind", [*FAULT_REMEDIES, *CONDITION_REMEDIES])
def test_remedy_has_a_row_in_the_operations_manual(kind: str):
    assert any(f'"{kind}"' in row or f"`{kind}`" in row for row in ROWS), kind


def test_remedy_of_an_unlisted_return_code():
    assert remedy("corrupted_inforom") == RETURN_CODE_REMEDY
