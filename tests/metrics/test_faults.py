"""gpumond_faults_total counts the starts of faults, not their ticks."""

from __future__ import annotations

from gpumond.facts.snapshot import Fault
from gpumond.metrics.telemetry import Telemetry
from tests.helpers.values import make_fault


def count(telemetry: Telemetry, fault: Fault) -> float | None:
    return telemetry.registry.get_sample_value("gpumond_faults_total", {"source": fault.source, "kind": fault.kind})


def test_lasting_fault_counts_once_and_a_returning_one_again():
    telemetry, hidden = Telemetry(), make_fault("AMD-a", "processes_hidden", "drm")
    for standing in ([hidden], [hidden], [], [hidden]):
        telemetry.faults(standing)
    assert count(telemetry, hidden) == 2


def test_faults_are_counted_for_each_device():
    telemetry = Telemetry()
    telemetry.faults([make_fault("GPU-a"), make_fault("GPU-b")])
    telemetry.faults([make_fault("GPU-a"), make_fault("GPU-b"), make_fault("GPU-c")])
    assert count(telemetry, make_fault()) == 3


def test_missing_reading_ends_no_fault():
    telemetry = Telemetry()
    telemetry.faults([make_fault("GPU-a")])
    telemetry.faults([], complete=False)
    telemetry.faults([make_fault("GPU-a")])
    assert count(telemetry, make_fault()) == 1
