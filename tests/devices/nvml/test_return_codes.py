"""Every return code of every function: table-driven, in one process for speed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from gpumond.devices.child.pipe import ReadResponse
from gpumond.facts.snapshot import DeviceReading
from tests.devices.nvml.child import NvmlChild, by_uuid
from tests.devices.nvml.functions import (
    CODES,
    DRIVER_GONE,
    LOST,
    ONCE_FUNCTIONS,
    SLOW_FUNCTIONS,
    SUPERSEDED,
    UNSUPPORTED,
)
from tests.fakenvml import FakeDriver, machine

NOT_FOUND = 6

IDENTITY = ("nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID")
MIG = ("nvmlDeviceGetMigMode", "nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex")
MEMORY = "nvmlDeviceGetMemoryInfo_v2"
COMPUTE = "nvmlDeviceGetComputeRunningProcesses_v3"
LISTS = (COMPUTE, "nvmlDeviceGetGraphicsRunningProcesses_v3", "nvmlDeviceGetMPSComputeRunningProcesses_v3")
TEMPERATURE = "nvmlDeviceGetTemperature"
REASONS = "nvmlDeviceGetCurrentClocksEventReasons"
ACTIVITY = "nvmlDeviceGetProcessUtilization"
UNKNOWN: dict[str, dict[str, Any]] = {
    "nvmlDeviceGetName": {"name": ""},
    "nvmlDeviceGetPciInfo_v3": {"pci_bus_id": ""},
    **{function: {} for function in MIG},
    MEMORY: {"size_bytes": None, "used_bytes": None, "free_bytes": None, "reserved_bytes": None},
    **{function: {"processes": None} for function in LISTS},
    "nvmlDeviceGetUtilizationRates": {"gpu_utilization_ratio": None, "memory_controller_utilization_ratio": None},
    "nvmlDeviceGetClockInfo": {"sm_clock_hertz": None, "memory_clock_hertz": None},
    TEMPERATURE: {"gpu_temperature_celsius": None},
    "nvmlDeviceGetPowerUsage": {"power_watts": None},
    "nvmlDeviceGetTotalEnergyConsumption": {"energy_joules": None},
    REASONS: {"throttle_reasons": None},
    ACTIVITY: {},
    **{function: dict.fromkeys(names) for function, names in (SLOW_FUNCTIONS | ONCE_FUNCTIONS).items()},
}
"""Return the fields of a device that are unknown when the function fails."""


def flat(device: DeviceReading) -> dict[str, Any]:
    values = asdict(device)
    return values | values.pop("sensors")


def expected(healthy: dict[str, Any], function: str, code: int) -> dict[str, Any]:
    if function == MEMORY and code in UNSUPPORTED:
        return healthy | {"used_bytes": healthy["used_bytes"] + healthy["reserved_bytes"], "reserved_bytes": None}
    if code in SUPERSEDED and function in (*LISTS, TEMPERATURE, REASONS):
        return healthy  # an older or a newer function answers
    if code == 3 and function in LISTS:
        return healthy | ({"processes": ()} if function == COMPUTE else {})
    if function == ACTIVITY:
        ratio = 0.0 if code == NOT_FOUND else None  # no sample: nothing ran
        return healthy | {
            "processes": tuple(p | {"utilization_ratio": ratio, "idle_seconds": None} for p in healthy["processes"])
        }
    return healthy | UNKNOWN[function]


@pytest.fixture(scope="module")
def driver_of_all(nvml_library: Path, tmp_path_factory: pytest.TempPathFactory) -> FakeDriver:
    driver = FakeDriver(tmp_path_factory.mktemp("driver"), nvml_library, machine(2, [1, 2, 3, 4]))
    driver.devices[0].mig_mode = 1
    return driver


@pytest.fixture(scope="module")
def child_of_all(driver_of_all: FakeDriver) -> Iterator[NvmlChild]:
    """One process for all functions, because its start takes longer than a test."""
    with NvmlChild(driver_of_all.env) as child:
        yield child


TIMES = count(100.0, 100.0)


def answer_after(driver: FakeDriver, child: NvmlChild, function: str = "", code: int = 0) -> ReadResponse:
    """Start the source again, without state of an earlier code, and return its first answer; the function fails."""
    at = next(TIMES)
    driver.heal()
    driver.fail("nvmlDeviceGetCount_v2", code=1)
    driver.write()
    child.answer(at)
    driver.heal()
    if function:
        driver.fail(function, code=code)
    driver.write()
    return child.answer(at)


@pytest.mark.parametrize("function", [*IDENTITY, *UNKNOWN])
def test_failing_function_makes_only_its_fields_unknown(
    driver_of_all: FakeDriver, child_of_all: NvmlChild, function: str
) -> None:
    """There is no crash and no wrong value: unknown values are None with a fault, or None if not supported."""
    before = answer_after(driver_of_all, child_of_all).reading
    assert before is not None
    healthy = {uuid: flat(device) for uuid, device in by_uuid(before).items()}
    for code in CODES:
        answer = answer_after(driver_of_all, child_of_all, function, code)
        if code in DRIVER_GONE:
            assert answer.reading is None, code
            continue
        assert answer.reading is not None, (code, answer)
        devices = by_uuid(answer.reading)
        if function in IDENTITY:
            assert not devices, code
            assert answer.reading.faults, code
        elif code in LOST:
            assert all(flat(device) == healthy[uuid] for uuid, device in devices.items()), code
            assert len(devices) + len(answer.reading.faults) == 2, code
        else:
            assert {u: flat(d) for u, d in devices.items()} == {
                u: expected(healthy[u], function, code) for u in healthy
            }, code
            nothing_there = function in (ACTIVITY, "nvmlDeviceGetMigDeviceHandleByIndex") and code == NOT_FOUND
            assert bool(answer.reading.faults) == (code not in UNSUPPORTED and not nothing_there), code
