"""Claims of agents that the driver does not bear out do not change the verdicts on a device."""

from __future__ import annotations

from gpumond.diagnosis import Diagnosis, diagnose
from gpumond.model import AgentReport
from gpumond.sensors import Sensors
from tests.making import GIB, a_device, a_pool, a_process, a_report, a_snapshot


def kinds(*reports: AgentReport) -> set[tuple[str, int | None]]:
    """The verdicts after two minutes in which 40 GiB of the device have no owner."""
    idle = Sensors(gpu_utilization_ratio=0.0)
    device = a_device(used_bytes=41 * GIB, processes=(a_process(5, GIB),), sensors=idle)
    diagnosis = Diagnosis()
    for second in range(120):
        at = float(second)
        snapshot = a_snapshot(device, seq=second, taken_at=at, elapsed_seconds=at, reports=reports)
        diagnosis = diagnose(diagnosis, snapshot)
    return {(verdict.kind, verdict.pid) for verdict in diagnosis.verdicts}


def test_a_claim_of_an_unlisted_process_does_not_hide_memory_without_an_owner():
    assert ("orphan", None) in kinds()
    assert ("orphan", None) in kinds(a_report(66, (a_pool(live=40 * GIB),)))
