"""Rules on gpumond itself. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

from gpumond.facts.snapshot import Snapshot
from gpumond.quantities.scope import RuleContext, ScopeSpec
from gpumond.quantities.table import DRIVER_RESPONSIVE, DRIVER_UP, STORE_WRITABLE, Quantity


def daemon(context: RuleContext) -> Sequence[Snapshot]:
    return (context.snapshot,)


DAEMON = ScopeSpec(
    rows=daemon,
    values=(
        DRIVER_UP,
        DRIVER_RESPONSIVE,
        Quantity("agents", "count", "programs with an agent", lambda row: float(len(row.reports))),
        STORE_WRITABLE,
        Quantity(
            "devices",
            "count",
            "devices that the driver lists; unknown while it cannot be read",
            lambda row: float(len(row.devices)) if row.source.up else None,
        ),
        Quantity("engines", "count", "declared serving engines", lambda row: float(len(row.engines))),
        Quantity("faults", "count", "values and devices that cannot be read", lambda row: float(len(row.faults))),
    ),
    labels={},
    labels_of=lambda row: (),
    placeholders={"reason": "why the driver cannot be read"},
    texts=lambda row: {"reason": row.source.detail or row.source.reason},
)
