"""The fake driver returns its configured values through the real bindings."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakenvml import Device, FakeDriver, Process, machine

PRELUDE = "from pynvml import *\nnvmlInit()\nhandle = nvmlDeviceGetHandleByIndex(0)\n"


def run(driver: FakeDriver, program: str) -> subprocess.CompletedProcess[str]:
    driver.write()
    command = [sys.executable, "-c", PRELUDE + program]
    return subprocess.run(command, env={**os.environ, **driver.env}, capture_output=True, text=True, timeout=60)


@pytest.fixture
def device(driver: FakeDriver) -> Device:
    driver.devices = machine(1)
    return driver.devices[0]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(("name", "number"), [("segv", signal.SIGSEGV), ("abort", signal.SIGABRT)])
def test_crash_occurs_after_the_configured_number_of_calls(driver: FakeDriver, name: str, number: int) -> None:
    driver.crash("nvmlDeviceGetUUID", 0, signal=name, after=2)
    ended = run(driver, "for _ in range(9): print(nvmlDeviceGetUUID(handle), flush=True)")
    assert ended.returncode == -number
    assert ended.stdout.split() == [driver.devices[0].uuid] * 2


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("function", ["nvmlDeviceGetUUID", "nvmlShutdown"])
def test_hang_lasts_for_its_configured_time(driver: FakeDriver, function: str) -> None:
    driver.hang(function, seconds=0.3)
    ended = run(
        driver,
        "import time\nbegan = time.monotonic()\nnvmlDeviceGetUUID(handle)\nnvmlShutdown()\n"
        "print(time.monotonic() - began >= 0.3)",
    )
    assert ended.stdout == "True\n"


@pytest.mark.usefixtures("device")
def test_missing_function_is_missing_and_a_stale_handle_is_refused(driver: FakeDriver) -> None:
    driver.missing("nvmlDeviceGetFanSpeed")
    ended = run(
        driver,
        "for handle, ask in ((handle, nvmlDeviceGetFanSpeed), (c_nvmlDevice_t(), nvmlDeviceGetUUID)):\n"
        "    try: ask(handle)\n"
        "    except NVMLError as error: print(type(error).__name__)",
    )
    assert ended.stdout.split() == ["NVMLError_FunctionNotFound", "NVMLError_InvalidArgument"]


def test_process_lists_obey_the_size_protocol(driver: FakeDriver, device: Device) -> None:
    device.processes = [Process(pid, pid * 3) for pid in range(1, 6)]
    ended = run(
        driver,
        "from pynvml import _nvmlGetFunctionPointer as function\n"
        "ask = function('nvmlDeviceGetComputeRunningProcesses_v3')\n"
        "for capacity in (0, 4, 5, 9):\n"
        "    count, entries = c_uint(capacity), (c_nvmlProcessInfo_v3_t * 9)()\n"
        "    print(ask(handle, byref(count), entries), count.value, [entry.pid for entry in entries[:6]])",
    )
    assert ended.stdout.splitlines() == [
        "7 5 [0, 0, 0, 0, 0, 0]",
        "7 5 [1, 2, 3, 4, 0, 0]",
        "0 5 [1, 2, 3, 4, 5, 0]",
        "0 5 [1, 2, 3, 4, 5, 0]",
    ]


def test_event_is_returned_once(driver: FakeDriver, device: Device) -> None:
    device.events = [(8, 79)]
    ended = run(
        driver,
        "events = nvmlEventSetCreate()\nnvmlDeviceRegisterEvents(handle, 8, events)\n"
        "event = nvmlEventSetWait(events, 10)\nprint(event.eventType, event.eventData)\n"
        "try: nvmlEventSetWait(events, 10)\nexcept NVMLError_Timeout: print('quiet')",
    )
    assert ended.stdout.split() == ["8", "79", "quiet"]


def test_driver_is_missing_without_a_file(driver: FakeDriver, tmp_path: Path) -> None:
    driver.env["FAKENVML_FILE"] = str(tmp_path / "nothing")
    assert "Driver Not Loaded" in run(driver, "").stderr
