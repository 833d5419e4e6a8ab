"""The mutations of ``guarantees.yaml`` apply to this tree; ``make soak`` runs their tests."""

from __future__ import annotations

import pytest

from tests.guarantees import MUTATIONS, ROOT, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_mutation_applies(mutation: Mutation):
    mutation.applied((ROOT / mutation.path).read_text())
    file, _, name = mutation.test.partition("::")
    assert not name or f"def {name.partition('[')[0]}(" in (ROOT / file).read_text()
