"""The program's part of a report besides its pools: scopes, steps and out-of-memory errors.

The modules of scopes and steps are not loaded in a program that marks none.
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


def sample(pools: Sequence[PoolUsage]) -> None:
    """Update open scopes and the out-of-memory errors with the pools that a report has read."""
    scopes = _scopes()
    if scopes is not None and scopes.has_open_blocks:
        scopes.sample(levels(pools))
    OOMS.record_counters(pools)


def program_report(distributed: bool, refusals: int = 0) -> Program:
    """Return the report. ``distributed``: a rank of a job. ``refusals``: refused commands and messages."""
    scopes, steps = _scopes(), _steps()
    if not (scopes or steps or OOMS.happened or distributed or refusals):
        return SILENT
    return Program(
        scopes=scopes.usage() if scopes else (),
        step=steps.usage() if steps else None,
        ooms=OOMS.recent(),
        oom_retries=OOMS.retries,
        oom_rescues=OOMS.rescues,
        distributed=distributed,
        refusals=refusals,
    )


def _scopes() -> Scopes | None:
    # The program may be importing the module in another thread: it then has no such attribute yet.
    return getattr(sys.modules.get("gpumond.agent.instrument.scopes"), "SCOPE_TOTALS", None)


def _steps() -> StepCounter | None:
    return getattr(sys.modules.get("gpumond.agent.instrument.steps"), "STEPS", None)
