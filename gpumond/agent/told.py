"""What the program tells of itself in a report, beside its pools."""

from __future__ import annotations

from collections.abc import Sequence

from gpumond.agent.levels import levels
from gpumond.agent.ooms import OOMS
from gpumond.agent.scopes import SCOPES_SEEN
from gpumond.agent.steps import STEPS
from gpumond.model import PoolUsage
from gpumond.program import Program


def look(pools: Sequence[PoolUsage]) -> None:
    """What a report has read is a sample for the scopes under way, and shows errors that nobody has caught."""
    if SCOPES_SEEN.under_way:
        SCOPES_SEEN.see(levels(pools))
    OOMS.look(pools)


def told(distributed: bool, refusals: int = 0) -> Program:
    """``distributed``: it is a rank of a job. ``refusals``: what the agent would not hear or do."""
    return Program(
        SCOPES_SEEN.usage(),
        STEPS.usage(),
        OOMS.recent(),
        OOMS.retries,
        OOMS.rescues,
        distributed=distributed,
        refusals=refusals,
    )
