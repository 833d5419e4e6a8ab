"""Verdicts on a device do not depend on agents' claims that the driver does not confirm."""

from __future__ import annotations

from gpumond.diagnosis.diagnosis import Diagnosis, diagnose
from gpumond.facts.sensors import Sensors
from gpumond.facts.snapshot import AgentReport
from gpumond.testing import GIB, make_device, make_pool, make_process, make_report, make_snapshot


def kinds(*reports: AgentReport) -> set[tuple[str, int | None]]:
    """Return the verdicts after two minutes in which 40 GiB of the device have no owner."""
    idle = Sensors(gpu_utilization_ratio=0.0)
    device = make_device(used_bytes=41 * GIB, processes=(make_process(5, GIB),), sensors=idle)
    diagnosis = Diagnosis()
    for second in range(120):
        at = float(second)
        snapshot = make_snapshot(device, seq=second, taken_at=at, elapsed_seconds=at, reports=reports)
        diagnosis = diagnose(diagnosis, snapshot)
    return {(verdict.kind, verdict.pid) for verdict in diagnosis.verdicts}


def test_claim_of_an_unlisted_process_does_not_hide_memory_without_an_owner():
    assert ("orphan", None) in kinds()
    assert ("orphan", None) in kinds(make_report(66, (make_pool(live=40 * GIB),)))
