"""A complete frame, as the API and its stream state it."""

from __future__ import annotations

from dataclasses import dataclass

from gpumond import __version__
from gpumond.api.holdings import ProcessHolding, holdings
from gpumond.host.machine_name import MACHINE_NAME
from gpumond.model.conditions import conditions
from gpumond.model.frame import Alert, Frame, Ledger, Verdict
from gpumond.model.remedies import remedy
from gpumond.model.silences import Silence
from gpumond.model.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class StatedFault:
    """Failure to read a value, with its remedy."""

    source: str
    kind: str
    device_uuid: str | None
    detail: str
    remedy: str


@dataclass(frozen=True, slots=True)
class StatedCondition:
    """Condition that limits the accuracy of a device's values, or of the machine's, with its remedy.

    `detail` states the process and the reason if the condition concerns one process.
    """

    device_uuid: str | None
    kind: str
    remedy: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeFrame:
    """One complete frame. Responses of the other routes are parts of a frame, and may differ by a tick.

    `host` is the name of the machine; in a pod that of its node, if `NODE_NAME` is set.
    """

    version: str
    host: str
    snapshot: Snapshot
    ledger: Ledger
    verdicts: tuple[Verdict, ...]
    alerts: tuple[Alert, ...]
    silences: tuple[Silence, ...]
    processes: tuple[ProcessHolding, ...]
    faults: tuple[StatedFault, ...]
    conditions: tuple[StatedCondition, ...]


def whole_frame(frame: Frame) -> WholeFrame:
    return WholeFrame(
        version=__version__,
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
