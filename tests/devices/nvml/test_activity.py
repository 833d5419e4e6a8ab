from __future__ import annotations

import pytest

from tests.devices.nvml.child import NvmlChild, kinds
from tests.fakenvml import NOT_AVAILABLE, Device, FakeDriver, Process


def ratios(child: NvmlChild, at: float) -> dict[int, float | None]:
    return {process.pid: process.utilization_ratio for process in child.read(at).devices[0].processes or ()}


@pytest.fixture
def device(driver: FakeDriver) -> Device:
    driver.devices = [Device("GPU-0", process_sampling=1)]
    return driver.devices[0]


def test_processes_have_their_utilization_and_zero_without_a_sample(driver: FakeDriver, device: Device) -> None:
    device.processes = [Process(7, utilization=84), Process(8, utilization=0), Process(9)]
    driver.write()
    with NvmlChild(driver.env) as child:
        assert ratios(child, 0) == {7: 0.84, 8: 0.0, 9: 0.0}
        device.processes = [Process(7), Process(8, utilization=5), Process(9)]
        driver.write()
        assert ratios(child, 5) == {7: 0.84, 8: 0.0, 9: 0.0}
        assert ratios(child, 10) == {7: 0.0, 8: 0.05, 9: 0.0}


def test_process_newer_than_the_query_is_unknown(driver: FakeDriver, device: Device) -> None:
    device.processes = [Process(7)]
    driver.write()
    with NvmlChild(driver.env) as child:
        ratios(child, 0)
        device.processes += [Process(8, utilization=99)]
        driver.write()
        assert ratios(child, 5) == {7: 0.0, 8: None}
        assert ratios(child, 10) == {7: 0.0, 8: 0.99}


def test_unused_device_has_no_active_processes(driver: FakeDriver, device: Device) -> None:
    device.processes = [Process(7)]
    driver.write()
    with NvmlChild(driver.env) as child:
        reading = child.read()
    assert reading.faults == ()
    assert [process.utilization_ratio for process in reading.devices[0].processes or ()] == [0.0]


def test_impossible_values_are_unknown_and_a_fault(driver: FakeDriver, device: Device) -> None:
    device.processes = [Process(7, utilization=255), Process(8, NOT_AVAILABLE, utilization=3)]
    driver.write()
    with NvmlChild(driver.env) as child:
        reading = child.read()
    assert {process.utilization_ratio for process in reading.devices[0].processes or ()} == {None}
    assert kinds(reading) == {("GPU-0", "impossible_value")}
