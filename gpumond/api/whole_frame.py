"""A complete frame, as the API and its stream state it."""

from __future__ import annotations

from gpumond import __version__, revision
from gpumond.api.holdings import holdings
from gpumond.host.machine_name import MACHINE_NAME
from gpumond.model.conditions import conditions
from gpumond.model.frame import Frame
from gpumond.model.remedies import remedy
from gpumond.model.snapshot import Snapshot
from gpumond.model.whole_frame import StatedCondition, StatedFault, WholeFrame

REVISION = revision() or None


def whole_frame(frame: Frame) -> WholeFrame:
    return WholeFrame(
        version=__version__,
        revision=REVISION,
        host=MACHINE_NAME,
        snapshot=frame.snapshot,
        ledger=frame.ledger,
        verdicts=frame.verdicts,
        alerts=frame.alerts,
        silences=frame.silences,
        processes=tuple(holdings(frame)),
        faults=stated_faults(frame.snapshot),
        conditions=stated_conditions(frame.snapshot),
    )


def stated_faults(snapshot: Snapshot) -> tuple[StatedFault, ...]:
    return tuple(StatedFault(f.source, f.kind, f.device_uuid, f.detail, remedy(f.kind)) for f in snapshot.faults)


def stated_conditions(snapshot: Snapshot) -> tuple[StatedCondition, ...]:
    return tuple(
        StatedCondition(each.device_uuid, each.kind, remedy(each.kind), each.detail) for each in conditions(snapshot)
    )
