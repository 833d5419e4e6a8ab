"""Frames of a program that trains."""

from __future__ import annotations

from gpumond.facts.frame import Frame
from gpumond.facts.snapshot import DeviceReading, Sensors, Snapshot
from gpumond.tick.ledger import make_ledger
from tests.helpers.agents import GIB
from tests.helpers.values import make_device, make_pool, make_process, make_report, make_snapshot


def frame(seconds: float, *devices: DeviceReading, **fields: object) -> Frame:
    snapshot: Snapshot = make_snapshot(*devices, elapsed_seconds=seconds, taken_at=1000 + seconds, **fields)
    return Frame(snapshot, make_ledger(snapshot))


BUSY = Sensors(gpu_utilization_ratio=0.5)


def training(seconds: float, live: int, retries: int = 0, missed_readings: int = 0) -> Frame:
    device = make_device(
        used_bytes=20 * GIB,
        processes=(make_process(used_bytes=8 * GIB),),
        sensors=BUSY,
        missed_readings=missed_readings,
    )
    report = make_report(pools=(make_pool(live=live, cached=GIB, stranded=GIB, retries=retries),))
    return frame(seconds, device, reports=(report,))
