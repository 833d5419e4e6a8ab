from __future__ import annotations

from dataclasses import asdict

import pytest

from gpumond.devices.nvml.sensors import METRICS
from gpumond.facts.snapshot import Reading
from tests.devices.nvml.child import NvmlChild, kinds
from tests.devices.nvml.functions import CODES, DRIVER_GONE, LOST, UNSUPPORTED
from tests.fakenvml import Device, FakeDriver

NAMES = [metric.field for metric in METRICS]
MIB = 1 << 20
NO_PERMISSION = 4


def profile(reading: Reading) -> dict[str, float]:
    sensors = asdict(reading.devices[0].sensors)
    return {name: sensors[name] for name in NAMES if sensors[name] is not None}


@pytest.fixture
def device(driver: FakeDriver) -> Device:
    driver.devices = [Device("GPU-0", gpm_permille=500)]
    driver.write()
    return driver.devices[0]


def test_values_cover_the_time_between_two_slow_readings(driver: FakeDriver, device: Device) -> None:
    with NvmlChild(driver.env) as child:
        assert profile(child.read(0)) == {}
        device.gpm_permille = 700
        driver.write()
        assert profile(child.read(5)) == {}
        reading = child.read(10)
        expected = {metric.field: (60 + metric.number) * metric.factor for metric in METRICS}
        expected.pop("sm_occupancy_ratio")  # this driver does not have it
        assert profile(reading) == pytest.approx(expected)
        assert expected["nvlink_receive_bytes_per_second"] == 120 * MIB
        assert profile(child.read(15)) == profile(reading)
        assert reading.faults == ()


def test_impossible_values_are_unknown_and_a_fault(driver: FakeDriver, device: Device) -> None:
    device.gpm_permille = 995
    driver.write()
    with NvmlChild(driver.env) as child:
        child.read(0)
        reading = child.read(10)
    assert profile(reading).keys() == {"nvlink_receive_bytes_per_second", "nvlink_transmit_bytes_per_second"}
    assert kinds(reading) == {("GPU-0", "impossible_value")}


FUNCTIONS = ("nvmlGpmQueryDeviceSupport", "nvmlGpmSampleAlloc", "nvmlGpmSampleGet", "nvmlGpmMetricsGet")


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.usefixtures("device")
def test_failing_function_makes_only_these_fields_unknown(driver: FakeDriver, function: str) -> None:
    """The code does not matter; test_return_codes covers all other functions."""
    at = 0.0
    with NvmlChild(driver.env) as child:
        for code in CODES:
            driver.heal()
            driver.fail("nvmlDeviceGetCount_v2", code=1)
            driver.write()
            child.answer(at := at + 100)  # the source starts again, without state of the previous code
            driver.heal()
            driver.fail(function, code=code)
            driver.write()
            answers = [child.answer(at), child.answer(at := at + 10)]
            if code in DRIVER_GONE:
                assert any(answer.reading is None for answer in answers), code
                continue
            first, last = (answer.reading for answer in answers)
            assert first is not None, code
            assert last is not None, code
            if code in LOST:
                assert len(first.devices) < 1 or len(last.devices) < 1, code
                continue
            assert profile(last) == {}, code
            assert last.devices[0].sensors.power_limit_watts is not None, code
            assert bool(last.faults) == (code not in {*UNSUPPORTED, NO_PERMISSION}), code


@pytest.mark.usefixtures("device")
def test_lost_device_restarts_its_samples_and_frees_the_old_ones(driver: FakeDriver) -> None:
    """The fake driver holds at most 128 samples."""
    at = 0.0
    with NvmlChild(driver.env) as child:
        for _ in range(150):
            child.read(at)
            at += 10
        assert profile(child.read(at))
        for _ in range(70):
            driver.lose(0)
            driver.write()
            child.read(at := at + 10)
            driver.heal()
            driver.write()
            child.read(at := at + 10)
        assert profile(child.read(at + 10))
