"""Amounts in alerts and verdicts are those of the row beside them, during each simulated scenario."""

from __future__ import annotations

import pytest

from gpumond.features.loadgen.plan import SCENARIOS, plan
from gpumond.features.rules.built_in import BUILT_IN
from tests.helpers.frames import as_json
from tests.helpers.simulated_snapshots import snapshots
from tests.helpers.stated_amounts import contradictions
from tests.helpers.values import TickState, advance


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_text_contradicts_the_row_beside_it(name: str):
    state = TickState()
    for snapshot in snapshots(plan(name, 1, duration="1h"), 5.0):
        advanced = advance(state, BUILT_IN, snapshot)
        state = advanced.memory
        if advanced.frame.alerts or advanced.frame.verdicts:
            assert list(contradictions(as_json(advanced.frame))) == []
