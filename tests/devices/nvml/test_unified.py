from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpumond.devices.nvml.source import file_cache_bytes, shared_memory
from tests.devices.nvml.child import NvmlChild
from tests.fakenvml import NOT_AVAILABLE, Device, FakeDriver, Process

KIB = 1024
SIZE, AVAILABLE = 125_533_864 * KIB, 100_200_300 * KIB
MEMORY = "nvmlDeviceGetMemoryInfo"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """Create a host of another size than the one that runs the test."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(
        f"MemTotal: {SIZE // KIB} kB\nMemFree: 1 kB\nMemAvailable: {AVAILABLE // KIB} kB\nHugePages_Total:       0\n"
    )
    return tmp_path / "proc"


def spark(**fields: object) -> Device:
    device = Device("GPU-0", name="NVIDIA GB10", total_bytes=None, processes=[Process(1, 5 * KIB), Process(2, 7 * KIB)])
    for name, value in fields.items():
        setattr(device, name, value)
    return device


@pytest.mark.parametrize("total", [None, 0])
def test_integrated_device_uses_the_machines_memory(driver: FakeDriver, proc: Path, total: int | None) -> None:
    driver.devices = [spark(total_bytes=total, reserved_bytes=0)]
    driver.write()
    with NvmlChild(driver.env, proc) as child:
        reading = child.read()
    (device,) = reading.devices
    assert device.unified
    assert (device.size_bytes, device.free_bytes, device.reserved_bytes) == (SIZE, AVAILABLE, None)
    assert device.used_bytes == 12 * KIB
    assert reading.faults == ()


def test_unified_usage_is_unknown_if_that_of_a_process_is(driver: FakeDriver, proc: Path) -> None:
    driver.devices = [spark(processes=[Process(1, 5 * KIB), Process(2, NOT_AVAILABLE)])]
    driver.write()
    with NvmlChild(driver.env, proc) as child:
        assert child.read().devices[0].used_bytes is None
        driver.devices[0].processes = []
        driver.write()
        assert child.read(1).devices[0].used_bytes == 0


def test_driver_value_takes_precedence(driver: FakeDriver, proc: Path) -> None:
    driver.devices = [spark(total_bytes=SIZE - 1, used_bytes=KIB)]
    driver.write()
    with NvmlChild(driver.env, proc) as child:
        (device,) = child.read().devices
    assert (device.unified, device.size_bytes, device.used_bytes) == (False, SIZE - 1, KIB)


@pytest.mark.parametrize("code", [2, 4, 10, 999])
def test_failed_query_is_not_unified_memory(driver: FakeDriver, proc: Path, code: int) -> None:
    driver.devices = [spark(total_bytes=SIZE)]
    driver.fail(MEMORY, code=code)
    driver.fail(f"{MEMORY}_v2", code=code)
    driver.write()
    with NvmlChild(driver.env, proc) as child:
        (device,) = child.read().devices
    assert (device.unified, device.size_bytes, device.used_bytes) == (False, None, None)


@pytest.mark.parametrize(
    ("name", "integrated"),
    [
        ("NVIDIA GB10", True),
        ("Orin (nvgpu)", True),
        ("NVIDIA Jetson AGX Orin", True),
        ("NVIDIA Thor", True),
        ("NVIDIA GeForce GTX 1080", False),  # nvtop shows the host's memory here
        ("NVIDIA GB100", False),
        ("NVIDIA GB200", False),
        ("NVIDIA GH200 480GB", False),
        ("", False),
    ],
)
def test_integrated_devices_are_matched_by_known_names_only(proc: Path, name: str, integrated: bool) -> None:
    assert (shared_memory(name, str(proc)) is not None) == integrated


@pytest.mark.parametrize("content", [None, "", "MemTotal: 5 kB\n", "MemTotal: x\nMemAvailable: y\n", "MemTotal:\n"])
def test_unified_memory_is_unknown_without_meminfo(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "meminfo").write_text(content)
    assert shared_memory("NVIDIA GB10", str(tmp_path)) is None


NODE = "Node 8 MemTotal:       100663296 kB\nNode 8 FilePages:       2048 kB\nNode 8 Mapped:   7 kB\n"


@pytest.mark.parametrize(("addressing", "cached"), [(2, 2048 * KIB), (1, None), (None, None)])
def test_file_cache_in_coherent_memory_is_reported(
    driver: FakeDriver, tmp_path: Path, addressing: int | None, cached: int | None
) -> None:
    driver.devices = [Device("GPU-0", addressing=addressing, numa_node=8)]
    driver.write()
    (tmp_path / "devices/system/node/node8").mkdir(parents=True)
    (tmp_path / "devices/system/node/node8/meminfo").write_text(NODE)
    program = (
        "import sys; from gpumond.devices.nvml.source import NvmlSource\n"
        "source = NvmlSource(sys=sys.argv[1]); source.open()\n"
        "print(source.read().devices[0].sensors.file_cache_bytes)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, **driver.env}, capture_output=True, text=True, check=True)
    assert done.stdout == f"{cached}\n"


@pytest.mark.parametrize("content", [None, "", "Node 8 FilePages:\n", "Node 8 FilePages: x kB\n"])
def test_file_cache_is_unknown_without_node_meminfo(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "devices/system/node/node8").mkdir(parents=True)
        (tmp_path / "devices/system/node/node8/meminfo").write_text(content)
    assert file_cache_bytes(8, str(tmp_path)) is None
