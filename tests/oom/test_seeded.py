"""Out-of-memory errors of known cause: the first remedy is the right one, and the program then finishes."""

from __future__ import annotations

import pytest

from gpumond.facts.messages import to_json
from gpumond.facts.units import GIB
from tests.oom.seeded import APPLY, SEEDED, Plan, run

NAMES = [f"{number}-{plan.cause}" for number, plan in enumerate(SEEDED)]


@pytest.mark.parametrize("plan", SEEDED, ids=NAMES)
def test_the_first_remedy_removes_the_cause(plan: Plan):
    case = run(plan)
    assert case is not None
    first = case.remedies[0]
    assert first.name == plan.cause, [(each.name, each.enough, each.size_bytes) for each in case.remedies]
    if first.name != "nothing":
        assert run(APPLY[first.name](plan, case)) is None


def test_a_model_that_is_too_large_has_no_remedy():
    (plan,) = (plan for plan in SEEDED if plan.cause == "nothing")
    case = run(plan)
    assert case is not None
    assert case.summary.endswith("no remedy is enough: the program needs 31.5 GiB more than this GPU has")


@pytest.mark.parametrize("plan", SEEDED, ids=NAMES)
def test_a_case_file_states_the_request_and_its_size_is_limited(plan: Plan):
    case = run(plan)
    assert case is not None
    assert 0 < (case.missing_bytes or 0) <= 112 * GIB
    assert len(to_json(case)) < 1 << 20
