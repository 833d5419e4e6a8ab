from __future__ import annotations

import pytest

from gpumond.facts.snapshot import XidErrors
from tests.devices.nvml.child import NvmlChild
from tests.devices.nvml.functions import CODES, DRIVER_GONE, UNSUPPORTED
from tests.fakenvml import FakeDriver, machine

Xid, TIMEOUT = 8, 10


def test_repeated_xid_counts_twice(driver: FakeDriver) -> None:
    driver.devices = machine(2)
    driver.devices[0].events = [(Xid, 79), (Xid, 79), (Xid, 31)]
    driver.devices[1].events = [(Xid, 79), (1, 5)]  # the last one is no Xid
    driver.write()
    with NvmlChild(driver.env) as child:
        first, second = child.read(100), child.read(101)
        driver.devices[1].events = []
        driver.devices[0].events = [(Xid, 31)]
        driver.write()
        third = child.read(102)
    a, b = (device.uuid for device in driver.devices)
    assert first.xids == (XidErrors(a, 79, 2, 100), XidErrors(a, 31, 1, 100), XidErrors(b, 79, 1, 100))
    assert second.xids == first.xids
    assert third.xids == (XidErrors(a, 79, 2, 100), XidErrors(a, 31, 2, 102), XidErrors(b, 79, 1, 100))
    assert first.faults == ()


def test_xid_of_a_lost_device_is_counted(driver: FakeDriver) -> None:
    driver.devices = machine(2)
    driver.write()
    with NvmlChild(driver.env) as child:
        child.read(0)
        driver.lose(0)
        driver.devices[0].events = [(Xid, 79)]
        driver.write()
        lost, after = child.read(1), child.read(2)
        driver.heal()
        driver.devices[0].events = []
        driver.write()
        back = child.read(5)
        driver.devices[0].events = [(Xid, 79)]
        driver.write()
        again = child.read(6)
    assert len(lost.devices) == 1
    for reading in (lost, after, back):
        assert reading.xids == (XidErrors(driver.devices[0].uuid, 79, 1, 1),)
    assert back.devices[0].sensors.xid_events
    assert again.xids == (XidErrors(driver.devices[0].uuid, 79, 2, 6),)


def test_reading_does_not_wait_for_events(driver: FakeDriver) -> None:
    driver.devices = machine(1)
    driver.write()
    driver.count_calls()
    with NvmlChild(driver.env) as child:
        child.read(0)
        driver.calls()
        child.read(1)
    assert driver.calls()["nvmlEventSetWait_v2"] == 1


@pytest.mark.parametrize("function", ["nvmlEventSetCreate", "nvmlDeviceRegisterEvents", "nvmlEventSetWait_v2"])
def test_failed_subscription_reports_nothing_and_is_retried(driver: FakeDriver, function: str) -> None:
    """For every return code, the devices are still read, and unknown values are faults."""
    driver.devices = machine(1)
    uuid, at, heard = driver.devices[0].uuid, 0.0, 0
    driver.write()
    with NvmlChild(driver.env) as child:
        for code in CODES:
            driver.fail("nvmlDeviceGetCount_v2", code=1)
            driver.write()
            child.answer(at)  # the source starts again, without state of the previous code
            driver.heal()
            driver.devices[0].events = []
            driver.fail(function, code=code)
            driver.write()
            answers = [child.answer(at), child.answer(at + 1)]
            if code not in DRIVER_GONE and (function, code) != ("nvmlEventSetWait_v2", TIMEOUT):
                reading = answers[1].reading
                assert reading is not None, code
                assert reading.devices[0].sensors.xid_events is None, code
                assert bool(reading.faults) == (code not in UNSUPPORTED), code
            driver.heal()
            driver.devices[0].events = [(Xid, 48)]
            driver.write()
            reading = child.read(at + 50)
            heard += 1
            assert reading.faults == (), code
            assert reading.devices[0].sensors.xid_events, code
            assert reading.xids == (XidErrors(uuid, 48, heard, at + 50),), code
            at += 100
