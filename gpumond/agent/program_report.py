"""What the program tells of itself in a report, beside its pools.

Scopes and steps tell nothing, and are not even loaded, in a program that marks none.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpumond.agent.instrument.oom import OOMS
from gpumond.agent.instrument.usage import levels
from gpumond.model.pools import PoolUsage
from gpumond.model.program import SILENT, Program

if TYPE_CHECKING:
    from gpumond.agent.instrument.scopes import Scopes
    from gpumond.agent.instrument.steps import StepCounter


def look(pools: Sequence[PoolUsage]) -> None:
    """What a report has read is a sample for the scopes under way, and shows errors that nobody has caught."""
    scopes = _scopes()
    if scopes is not None and scopes.under_way:
        scopes.see(levels(pools))
    OOMS.look(pools)


def told(distributed: bool, refusals: int = 0) -> Program:
    """``distributed``: it is a rank of a job. ``refusals``: what the agent would not hear or do."""
    scopes, steps = _scopes(), _steps()
    if not (scopes or steps or OOMS.happened or distributed or refusals):
        return SILENT
    return Program(
        scopes.usage() if scopes else (),
        steps.usage() if steps else None,
        OOMS.recent(),
        OOMS.retries,
        OOMS.rescues,
        distributed=distributed,
        refusals=refusals,
    )


def _scopes() -> Scopes | None:
    return getattr(sys.modules.get("gpumond.agent.instrument.scopes"), "SCOPES_SEEN", None)


def _steps() -> StepCounter | None:
    return getattr(sys.modules.get("gpumond.agent.instrument.steps"), "STEPS", None)
