"""Idle times over several readings."""

from __future__ import annotations

import pytest

from gpumond.diagnosis.detectors import idle_seconds
from gpumond.facts.sensors import Sensors
from gpumond.facts.snapshot import DeviceReading, Reading, Snapshot, SourceState
from gpumond.testing import GIB, make_device, make_process
from gpumond.tick.observe import observe

UP = SourceState(name="nvml", up=True, responsive=True)


def last_snapshot(*devices: DeviceReading | None, every: float = 2.0) -> Snapshot:
    """Return the last of the snapshots of one device; None is a reading that did not arrive."""
    snapshot = None
    for number, device in enumerate(devices):
        reading = None if device is None else Reading(devices=(device,))
        snapshot = observe(snapshot, UP, reading, (), number * every, number * every)
    assert snapshot is not None
    return snapshot


def using(gpu: float | None, process: float | None = None, **fields: float) -> DeviceReading:
    sensors = Sensors(gpu_utilization_ratio=gpu, **fields)  # type: ignore[arg-type]
    return make_device(used_bytes=GIB, sensors=sensors, processes=(make_process(7, GIB, utilization_ratio=process),))


@pytest.mark.parametrize(
    ("readings", "seconds"),
    [
        ([using(0)], 0),
        ([using(0), using(0), using(0)], 4),
        ([using(0), using(0.01), using(0)], 2),
        ([using(0.5)], 0),
        ([using(None), using(None)], None),
        ([using(0), using(0), using(None), using(0)], 0),
        ([using(0), using(0), None, using(0)], 4),  # there was no reading for two of the six seconds
        ([using(0), using(0, decoder_utilization_ratio=0.2)], 0),
        ([using(0), using(0), None], 2),
    ],
)
def test_idle_time_of_a_device_counts_observed_seconds(readings: list[DeviceReading | None], seconds: float | None):
    (device,) = last_snapshot(*readings).devices
    assert device.idle_seconds == seconds


@pytest.mark.parametrize(
    ("readings", "seconds"),
    [
        ([using(0.9, 0), using(0.9, 0), using(0.9, 0)], 4),
        ([using(0.9, 0), using(0.9, 0.1), using(0.9, 0)], 2),
        ([using(0.9, 0.1)], 0),
        ([using(0.9), using(0.9)], None),
        ([using(0.0), using(0.0)], 2),  # nothing runs on the device, so the process is idle as well
        ([using(0.0), using(0.0), using(0.0, 0.0)], 4),
    ],
)
def test_idle_time_of_a_process_uses_its_own_and_its_devices(
    readings: list[DeviceReading | None], seconds: float | None
):
    (device,) = last_snapshot(*readings).devices
    (process,) = device.processes or ()
    assert idle_seconds(device, process) == seconds


def test_idle_time_of_a_reused_pid_starts_at_zero():
    first, second = (
        make_device(used_bytes=GIB, processes=(make_process(7, start_ticks=ticks, utilization_ratio=0.0),))
        for ticks in (100, 200)
    )
    (device,) = last_snapshot(first, first, second).devices
    assert [process.idle_seconds for process in device.processes or ()] == [0.0]
