"""Rules on gpumond itself. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

from gpumond.model.snapshot import RELEASED, STARTING, Snapshot
from gpumond.rules.scopes.context import RuleAttribute, RuleContext, ScopeSpec


def daemon(seen: RuleContext) -> Sequence[Snapshot]:
    return (seen.snapshot,)


DAEMON = ScopeSpec(
    rows=daemon,
    values=(
        RuleAttribute(
            "driver_up",
            "1 while the driver can be read, else 0; unknown until it was tried",
            lambda row: None if row.source.reason in (STARTING, RELEASED) else float(row.source.up),
        ),
        RuleAttribute(
            "driver_responsive", "0 while a driver call is overdue, else 1", lambda row: float(row.source.responsive)
        ),
        RuleAttribute("agents", "programs with an agent", lambda row: float(len(row.reports))),
        RuleAttribute(
            "store_writable",
            "1 while changes and alerts can be kept on disk, else 0",
            lambda row: None if row.store_writable is None else float(row.store_writable),
        ),
    ),
    labels={},
    labels_of=lambda row: (),
    placeholders={"reason": "why the driver cannot be read"},
    texts=lambda row: {"reason": row.source.detail or row.source.reason},
)
