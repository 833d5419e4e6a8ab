"""gpumond_faults_total counts the starts of faults, not their ticks."""

from __future__ import annotations

from gpumond.metrics.telemetry import Telemetry
from gpumond.model.snapshot import Fault
from gpumond.testing import make_fault


def count(telemetry: Telemetry, fault: Fault) -> float | None:
    return telemetry.registry.get_sample_value("gpumond_faults_total", {"source": fault.source, "kind": fault.kind})


def test_fault_that_lasts_counts_once_and_one_that_returns_again():
    telemetry, hidden = Telemetry(), make_fault("AMD-a", "processes_hidden", "drm")
    for standing in ([hidden], [hidden], [], [hidden]):
        telemetry.faults(standing)
    assert count(telemetry, hidden) == 2


def test_each_device_counts_for_itself():
    telemetry = Telemetry()
    telemetry.faults([make_fault("GPU-a"), make_fault("GPU-b")])
    telemetry.faults([make_fault("GPU-a"), make_fault("GPU-b"), make_fault("GPU-c")])
    assert count(telemetry, make_fault()) == 3


def test_reading_that_does_not_come_ends_nothing():
    telemetry = Telemetry()
    telemetry.faults([make_fault("GPU-a")])
    telemetry.faults([], complete=False)
    telemetry.faults([make_fault("GPU-a")])
    assert count(telemetry, make_fault()) == 1
