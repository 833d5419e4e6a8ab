from __future__ import annotations

from collections import Counter
from dataclasses import asdict, fields
from typing import Any

import pytest

from gpumond.devices.impossible_values import FaultCollector
from gpumond.devices.nvml import sensors as activity
from gpumond.devices.nvml.library import Device as RosterDevice
from gpumond.devices.nvml.sensors import GPM_METRICS, SLOW_SECONDS, SensorReader
from gpumond.facts.snapshot import ADDRESSING_MODES, THROTTLE_REASONS, VIRTUALIZATION_MODES, Reading, Sensors
from tests.devices.nvml.child import NvmlChild, by_uuid, kinds
from tests.devices.nvml.functions import CODES, DRIVER_GONE, LOST, ONCE_FUNCTIONS, SLOW_FUNCTIONS, UNSUPPORTED
from tests.fakenvml import NOT_AVAILABLE, Device, FakeDriver, Process, machine

NOT_ASKED = ("xid_events", "file_cache_bytes")
COMPUTE_MODES = ("default", "exclusive_thread", "prohibited", "exclusive_process")


def expected(configured: Device) -> dict[str, Any]:
    """Fields of Sensors, from the values in the file."""
    assert configured.throttle is not None
    assert configured.compute_mode is not None
    ratios = ("gpu_utilization", "encoder", "decoder", "fan")
    gpu, encoder, decoder, fan = (getattr(configured, name) / 100 for name in ratios)
    return {
        "gpu_utilization_ratio": gpu,
        "memory_controller_utilization_ratio": (configured.memory_utilization or 0) / 100,
        "sm_clock_hertz": (configured.sm_clock or 0) * 1e6,
        "memory_clock_hertz": (configured.memory_clock or 0) * 1e6,
        "gpu_temperature_celsius": configured.temperature,
        "power_watts": (configured.power or 0) / 1000,
        "energy_joules": (configured.energy or 0) / 1000,
        "encoder_utilization_ratio": encoder,
        "decoder_utilization_ratio": decoder,
        "sm_clock_max_hertz": (configured.max_sm_clock or 0) * 1e6,
        "memory_clock_max_hertz": (configured.max_memory_clock or 0) * 1e6,
        "throttle_reasons": tuple(r for bit, r in enumerate(THROTTLE_REASONS) if configured.throttle & 1 << bit),
        "performance_state": configured.performance_state,
        "memory_temperature_celsius": configured.memory_temperature,
        "slowdown_temperature_celsius": configured.slowdown_temperature,
        "shutdown_temperature_celsius": configured.shutdown_temperature,
        "power_limit_watts": (configured.power_limit or 0) / 1000,
        "fan_speed_ratio": fan,
        "persistence_mode": bool(configured.persistence),
        "compute_mode": COMPUTE_MODES[configured.compute_mode],
        "bar1_size_bytes": configured.bar1_total,
        "bar1_used_bytes": configured.bar1_used,
        "pcie_generation": configured.pcie_generation,
        "pcie_generation_max": configured.pcie_generation_max,
        "pcie_width": configured.pcie_width,
        "pcie_width_max": configured.pcie_width_max,
        "pcie_receive_bytes_per_second": (configured.pcie_receive or 0) * 1000,
        "pcie_transmit_bytes_per_second": (configured.pcie_transmit or 0) * 1000,
        "pcie_replays": configured.pcie_replays,
        "ecc_corrected_volatile": configured.ecc_corrected,
        "ecc_corrected_aggregate": configured.ecc_corrected_aggregate,
        "ecc_uncorrected_volatile": configured.ecc_uncorrected,
        "ecc_uncorrected_aggregate": configured.ecc_uncorrected_aggregate,
        "retired_pages_single_bit": configured.retired_single_bit,
        "retired_pages_double_bit": configured.retired_double_bit,
        "retired_pages_pending": bool(configured.retired_pending),
        "remapped_rows_correctable": configured.remapped_correctable,
        "remapped_rows_uncorrectable": configured.remapped_uncorrectable,
        "remapped_rows_pending": bool(configured.remapped_pending),
        "remapped_rows_failed": bool(configured.remapped_failure),
        "nvlink_crc_flit_errors": configured.nvlink_crc_flit,
        "nvlink_crc_data_errors": configured.nvlink_crc_data,
        "nvlink_replay_errors": configured.nvlink_replay,
        "nvlink_recovery_errors": configured.nvlink_recovery,
        "xid_events": True,
        "virtualization_mode": VIRTUALIZATION_MODES[configured.virtualization or 0],
        "addressing_mode": ADDRESSING_MODES[configured.addressing or 0],
        "numa_node": configured.numa_node,
        **dict.fromkeys((*(metric.field for metric in GPM_METRICS), "file_cache_bytes")),
    }


def test_sensors_of_8_devices_equal_those_of_the_driver(driver: FakeDriver) -> None:
    driver.devices = machine(8)
    driver.write()
    with NvmlChild(driver.env) as child:
        child.read(0)
        reading = child.read(1)
    assert reading.faults == ()
    assert reading.cuda_version == "13.0"
    for configured, device in zip(driver.devices, reading.devices, strict=True):
        assert asdict(device.sensors) == expected(configured)


def test_device_without_a_sensor_has_none_and_no_fault(driver: FakeDriver) -> None:
    driver.devices = [Device("GPU-0", fan=None, memory_temperature=0, performance_state=32, ecc_corrected=None)]
    driver.devices[0].virtualization = driver.devices[0].addressing = driver.devices[0].numa_node = 0
    for name in SLOW_FUNCTIONS.keys() - {"nvmlDeviceGetPerformanceState", "nvmlDeviceGetFieldValues"}:
        driver.fail(name, code=3)
    driver.write()
    with NvmlChild(driver.env) as child:
        reading = child.read()
    known = {name for name, value in asdict(reading.devices[0].sensors).items() if value is not None}
    assert known == set().union(*ONCE_FUNCTIONS.values()) | {"throttle_reasons", "xid_events"}
    assert reading.faults == ()


def test_slow_sensors_are_read_every_ten_seconds_and_static_ones_once(driver: FakeDriver) -> None:
    driver.devices = machine(2)
    driver.write()
    driver.count_calls()
    rounds = []
    with NvmlChild(driver.env) as child:
        for at in (0, 1, SLOW_SECONDS - 1, SLOW_SECONDS, SLOW_SECONDS + 1):
            driver.calls()
            reading = child.read(at)
            rounds.append(driver.calls())
            assert asdict(reading.devices[1].sensors) == expected(driver.devices[1])
    for slow in SLOW_FUNCTIONS:
        assert [slow in calls for calls in rounds] == [True, False, False, True, False], slow
    for static in ONCE_FUNCTIONS:
        assert [static in calls for calls in rounds] == [True, False, False, False, False], static


def test_fault_of_a_slow_sensor_lasts_until_its_next_reading(driver: FakeDriver) -> None:
    driver.devices = machine(1)
    driver.fail("nvmlDeviceGetFanSpeed", code=10)
    driver.fail("nvmlDeviceGetTemperatureThreshold", code=10)
    driver.write()
    fault = {(driver.devices[0].uuid, "timeout")}
    with NvmlChild(driver.env) as child:
        assert kinds(child.read(0)) == fault
        driver.heal()
        driver.write()
        reading = child.read(1)
        assert kinds(reading) == fault
        assert reading.devices[0].sensors.fan_speed_ratio is None
        reading = child.read(SLOW_SECONDS)
    assert reading.faults == ()
    assert asdict(reading.devices[0].sensors) == expected(driver.devices[0])


def test_returned_device_is_read_completely(driver: FakeDriver) -> None:
    driver.devices = machine(2)
    driver.write()
    with NvmlChild(driver.env) as child:
        child.read(0)
        driver.lose(0)
        driver.write()
        assert len(child.read(1).devices) == 1
        driver.heal()
        driver.devices[0].pcie_width_max = 8
        driver.write()
        device = by_uuid(child.read(3))[driver.devices[0].uuid]
    assert asdict(device.sensors) == expected(driver.devices[0])


@pytest.mark.parametrize("field_", [entry.name for entry in fields(Sensors) if entry.name not in NOT_ASKED])
def test_sensors_each_have_one_clock(field_: str) -> None:
    from gpumond.devices.nvml.sensors import FAST, ONCE, SLOW

    profile = [metric.field for metric in GPM_METRICS]
    assert Counter([*profile, *(name for question in (*FAST, *SLOW, *ONCE) for name in question.fields)])[field_] == 1


class SlowLibrary:
    """Library whose queries each take 10 ms of a manual clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.asked: Counter[str] = Counter()

    def set_index(self, index: int) -> None:
        pass

    def query(self, functions: Any, handle: str, *arguments: Any) -> Any:
        self.now += 0.01
        self.asked[handle] += 1
        return [] if functions[0] is activity._utilization_samples else 0  # GPM: not supported


def test_slow_sensors_of_many_devices_are_spread_over_readings() -> None:
    library = SlowLibrary()
    clocks = SensorReader(library, lambda: library.now)  # type: ignore[arg-type]
    devices = [RosterDevice(str(i), i, handle=str(i)) for i in range(64)]
    longest = 0.0
    for _ in range(200):
        began = library.now
        clocks.refresh(devices, lambda device, kind: None)
        longest = max(longest, library.now - began)
        library.now = max(library.now, began + 1.0)
    assert longest < 0.6
    assert min(library.asked.values()) > 0.5 * max(library.asked.values())
    assert clocks.read(devices[0], FaultCollector())["pcie_replays"] == 0


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


NAMES = [metric.field for metric in GPM_METRICS]
MIB = 1 << 20
NO_PERMISSION = 4


def profile(reading: Reading) -> dict[str, float]:
    sensors = asdict(reading.devices[0].sensors)
    return {name: sensors[name] for name in NAMES if sensors[name] is not None}


@pytest.fixture
def profiled(driver: FakeDriver) -> Device:
    driver.devices = [Device("GPU-0", gpm_permille=500)]
    driver.write()
    return driver.devices[0]


def test_values_cover_the_time_between_two_slow_readings(driver: FakeDriver, profiled: Device) -> None:
    with NvmlChild(driver.env) as child:
        assert profile(child.read(0)) == {}
        profiled.gpm_permille = 700
        driver.write()
        assert profile(child.read(5)) == {}
        reading = child.read(10)
        expected = {metric.field: (60 + metric.number) * metric.factor for metric in GPM_METRICS}
        expected.pop("sm_occupancy_ratio")  # this driver does not have it
        assert profile(reading) == pytest.approx(expected)
        assert expected["nvlink_receive_bytes_per_second"] == 120 * MIB
        assert profile(child.read(15)) == profile(reading)
        assert reading.faults == ()


def test_impossible_profile_values_are_unknown_and_a_fault(driver: FakeDriver, profiled: Device) -> None:
    profiled.gpm_permille = 995
    driver.write()
    with NvmlChild(driver.env) as child:
        child.read(0)
        reading = child.read(10)
    assert profile(reading).keys() == {"nvlink_receive_bytes_per_second", "nvlink_transmit_bytes_per_second"}
    assert kinds(reading) == {("GPU-0", "impossible_value")}


FUNCTIONS = ("nvmlGpmQueryDeviceSupport", "nvmlGpmSampleAlloc", "nvmlGpmSampleGet", "nvmlGpmMetricsGet")


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.usefixtures("profiled")
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


@pytest.mark.usefixtures("profiled")
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
