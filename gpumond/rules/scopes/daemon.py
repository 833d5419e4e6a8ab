"""Rules on gpumond itself. No I/O."""

from __future__ import annotations

from gpumond.model.snapshot import RELEASED, STARTING, Snapshot
from gpumond.rules import Subjects
from gpumond.rules.scopes.context import RuleContext


def daemon(seen: RuleContext) -> Subjects[Snapshot]:
    snapshot = seen.snapshot
    source, writable = snapshot.source, snapshot.store_writable
    return Subjects(
        rows=(snapshot,),
        values={
            "driver_up": lambda row: None if source.reason in (STARTING, RELEASED) else float(source.up),
            "driver_responsive": lambda row: float(source.responsive),
            "agents": lambda row: float(len(snapshot.reports)),
            "store_writable": lambda row: None if writable is None else float(writable),
        },
        labels=lambda row: (),
        texts=lambda row: {"reason": source.detail or source.reason},
    )
