"""Rules on gpumond itself. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

from gpumond.facts.snapshot import NO_DEVICE, RELEASED, STARTING, Snapshot
from gpumond.quantities.context import RuleAttribute, RuleContext, ScopeSpec, number


def daemon(context: RuleContext) -> Sequence[Snapshot]:
    return (context.snapshot,)


DAEMON = ScopeSpec(
    rows=daemon,
    values=(
        RuleAttribute(
            "driver_up",
            "boolean",
            "1 while the driver can be read, else 0; unknown before the first attempt and without any device",
            lambda row: None if row.source.reason in (STARTING, RELEASED, NO_DEVICE) else float(row.source.up),
        ),
        RuleAttribute(
            "driver_responsive",
            "boolean",
            "0 while a driver call is overdue, else 1",
            lambda row: float(row.source.responsive),
        ),
        RuleAttribute("agents", "count", "programs with an agent", lambda row: float(len(row.reports))),
        RuleAttribute(
            "store_writable",
            "boolean",
            "1 while changes and alerts can be written to disk, else 0",
            lambda row: number(row.store_writable),
        ),
        RuleAttribute(
            "devices",
            "count",
            "devices that the driver lists; unknown while it cannot be read",
            lambda row: float(len(row.devices)) if row.source.up else None,
        ),
        RuleAttribute("engines", "count", "declared serving engines", lambda row: float(len(row.engines))),
        RuleAttribute("faults", "count", "values and devices that cannot be read", lambda row: float(len(row.faults))),
    ),
    labels={},
    labels_of=lambda row: (),
    placeholders={"reason": "why the driver cannot be read"},
    texts=lambda row: {"reason": row.source.detail or row.source.reason},
)
