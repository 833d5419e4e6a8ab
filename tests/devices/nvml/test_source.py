from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpumond.devices.drm import drm_devices
from gpumond.devices.nvml.source import EMPTY_LISTS_SECONDS
from tests.devices.nvml.child import NvmlChild, kinds, used_by_pid
from tests.fakenvml import GIB, NOT_AVAILABLE, Device, FakeDriver, Process, machine

PIDS = range(1, 65)
DRIVER_GONE = {1: "uninitialized", 9: "driver_not_loaded", 12: "library_not_found", 18: "lib_rm_version_mismatch"}


def test_values_of_64_processes_on_8_devices_equal_those_of_the_driver(driver: FakeDriver) -> None:
    driver.devices = machine(8, PIDS)
    driver.write()
    with NvmlChild(driver.env) as child:
        reading = child.read()
    assert reading.faults == ()
    assert (reading.driver_version, reading.library_version) == ("580.65.06", "13.580.65.06")
    assert [device.index for device in reading.devices] == list(range(8))
    for configured, device in zip(driver.devices, reading.devices, strict=True):
        assert (device.uuid, device.name, device.vendor) == (configured.uuid, configured.name, "nvidia")
        assert (device.pci_bus_id, device.parent_uuid, device.unified) == (configured.pci_bus_id, None, False)
        assert (device.size_bytes, device.used_bytes) == (configured.total_bytes, configured.used_bytes)
        assert device.reserved_bytes == configured.reserved_bytes
        assert device.free_bytes == configured.total_bytes - configured.used_bytes - configured.reserved_bytes
        assert used_by_pid(device) == {process.pid: process.used_bytes for process in configured.processes}


def test_processes_carry_their_identity_from_proc(driver: FakeDriver) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    driver.devices = machine(1, [os.getpid(), ended.pid])
    driver.write()
    with NvmlChild(driver.env) as child:
        processes = {process.pid: process for process in child.read().devices[0].processes or ()}
    mine, gone = processes[os.getpid()], processes[ended.pid]
    assert mine.start_ticks is not None
    assert (mine.uid, mine.comm) == (os.geteuid(), Path("/proc/self/comm").read_text().rstrip("\n"))
    assert (gone.start_ticks, gone.uid, gone.comm) == (None, None, None)


def test_reading_makes_few_calls(driver: FakeDriver) -> None:
    driver.devices = machine(8, PIDS)
    driver.write()
    driver.count_calls()
    with NvmlChild(driver.env) as child:
        child.read(0)
        driver.calls()
        child.read(1)
        calls = driver.calls()
    assert calls.pop("nvmlEventSetWait_v2") == 1
    assert calls.total() == 8 * 8
    assert "nvmlInitWithFlags" not in calls


def test_old_library_uses_memory_version_1(driver: FakeDriver) -> None:
    """Its `used` includes reserved memory, which is then unknown."""
    driver.devices = machine(1)
    driver.missing("nvmlDeviceGetMemoryInfo_v2")
    driver.write()
    with NvmlChild(driver.env) as child:
        first = child.read(0)
        driver.heal()
        driver.write()
        second = child.read(20)
    configured = driver.devices[0]
    for reading in (first, second):
        assert reading.devices[0].used_bytes == configured.used_bytes + configured.reserved_bytes
        assert reading.devices[0].reserved_bytes is None
        assert reading.faults == ()


def test_failing_version_2_is_never_replaced_by_version_1(driver: FakeDriver) -> None:
    driver.devices = machine(1)
    driver.fail("nvmlDeviceGetMemoryInfo_v2", code=10)
    driver.write()
    with NvmlChild(driver.env) as child:
        reading = child.read()
    assert reading.devices[0].used_bytes is None
    assert kinds(reading) == {(driver.devices[0].uuid, "timeout")}


def test_process_in_several_lists_counts_once_and_in_several_instances_adds_up(driver: FakeDriver) -> None:
    driver.devices = [
        Device(
            "GPU-0",
            processes=[
                Process(10, 5 * GIB, ("compute",)),
                Process(10, 6 * GIB, ("graphics", "mps")),
                Process(11, 1 * GIB, gpu_instance=1, compute_instance=0),
                Process(11, 2 * GIB, gpu_instance=2, compute_instance=0),
                Process(12, NOT_AVAILABLE),
                Process(12, 3 * GIB, ("graphics",)),
                Process(13, NOT_AVAILABLE),
            ],
        )
    ]
    driver.write()
    with NvmlChild(driver.env) as child:
        reading = child.read()
    assert used_by_pid(reading.devices[0]) == {10: 6 * GIB, 11: 3 * GIB, 12: 3 * GIB, 13: None}
    assert [process.kinds for process in reading.devices[0].processes or ()] == [
        ("compute", "graphics", "mps"),
        ("compute",),
        ("compute", "graphics"),
        ("compute",),
    ]
    assert reading.faults == ()


def test_new_graphics_process_is_listed_at_once_or_if_used_memory_is_the_same_within_seconds(driver: FakeDriver):
    compute, graphics = Process(10, GIB), Process(11, GIB, ("graphics",))
    device = Device("GPU-0", processes=[compute], used_bytes=2 * GIB)
    driver.devices = [device]
    driver.write()
    with NvmlChild(driver.env) as child:

        def pids(at: float, processes: list[Process], used_bytes: int) -> set[int]:
            device.processes, device.used_bytes = processes, used_bytes
            driver.write()
            return set(used_by_pid(child.read(at).devices[0]))

        assert pids(0, [compute], 2 * GIB) == {10}
        assert pids(1, [compute, graphics], 3 * GIB) == {10, 11}
        assert pids(2, [compute], 3 * GIB) == {10}
        pids(3, [compute, graphics], 3 * GIB)
        assert pids(2 + EMPTY_LISTS_SECONDS, [compute, graphics], 3 * GIB) == {10, 11}


def test_older_process_lists_are_used_if_newer_ones_are_missing(driver: FakeDriver) -> None:
    driver.devices = machine(1, [1, 2])
    for name in ("Compute", "Graphics", "MPSCompute"):
        driver.missing(f"nvmlDeviceGet{name}RunningProcesses_v3")
    driver.write()
    with NvmlChild(driver.env) as child:
        reading = child.read()
        assert set(used_by_pid(reading.devices[0])) == {1, 2}
        for name in ("Compute", "Graphics", "MPSCompute"):
            driver.missing(f"nvmlDeviceGet{name}RunningProcesses_v2")
        driver.write()
        reading = child.read()
    assert reading.devices[0].processes is None
    assert reading.faults == ()


def test_process_list_takes_one_call_at_any_length(driver: FakeDriver) -> None:
    """The binding makes two calls, between which the list may grow."""
    driver.devices = machine(1, [1, 2])
    driver.write()
    driver.count_calls()
    with NvmlChild(driver.env) as child:
        child.read(0)
        driver.devices[0].processes = [Process(pid, 4096) for pid in range(1, 4000)]
        driver.write()
        driver.calls()
        reading = child.read(1)
    assert set(used_by_pid(reading.devices[0])) == set(range(1, 4000))
    assert driver.calls()["nvmlDeviceGetComputeRunningProcesses_v3"] == 1
    assert reading.faults == ()


def test_list_longer_than_any_device_can_run_is_dropped_with_a_flag(driver: FakeDriver) -> None:
    driver.devices = machine(2, [1, 2])
    driver.devices[0].processes = [Process(1 + i % 30_000, 4096) for i in range(100_000)]
    driver.write()
    with NvmlChild(driver.env) as child:
        reading = child.read()
    assert reading.devices[0].processes is None
    assert set(used_by_pid(reading.devices[1])) == {2}
    assert kinds(reading) == {(driver.devices[0].uuid, "impossible_value")}


def test_instance_has_its_identity(driver: FakeDriver) -> None:
    driver.devices = machine(1)
    driver.devices[0].mig_mode = 1
    driver.devices[0].instances = [Device("MIG-a", gpu_instance=7), Device("MIG-b", gpu_instance=None)]
    driver.write()
    with NvmlChild(driver.env) as child:
        reading = child.read()
    assert [device.gpu_instance_id for device in reading.devices] == [None, 7, None]
    assert reading.faults == ()


@pytest.mark.parametrize("total", [None, 0])
def test_missing_memory_information_is_unknown_without_a_fault(driver: FakeDriver, total: int | None) -> None:
    driver.devices = machine(1, [1])
    driver.devices[0].total_bytes = total
    driver.devices[0].reserved_bytes = driver.devices[0].used_bytes = 0
    driver.write()
    with NvmlChild(driver.env) as child:
        reading = child.read()
    (device,) = reading.devices
    assert (device.size_bytes, device.used_bytes, device.free_bytes, device.unified) == (None, None, None, False)
    assert used_by_pid(device) == {1: driver.devices[0].processes[0].used_bytes}
    assert reading.faults == ()


def test_undecodable_names_are_replaced_by_text(driver: FakeDriver) -> None:
    driver.devices = machine(1)
    driver.devices[0].name = "NVIDIA \udcff\x1b[31m"
    driver.devices[0].pci_bus_id = "0000\udcff:01:00.0"
    driver.write()
    with NvmlChild(driver.env) as child:
        reading = child.read()
    assert reading.devices[0].name == "NVIDIA \N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}[31m"
    assert kinds(reading) == {(driver.devices[0].uuid, "unreadable")}


@pytest.mark.parametrize("code", DRIVER_GONE)
def test_removed_driver_ends_the_source(driver: FakeDriver, code: int) -> None:
    driver.devices = machine(1)
    driver.write()
    with NvmlChild(driver.env) as child:
        child.read()
        driver.fail("nvmlDeviceGetMemoryInfo_v2", code=code)
        driver.write()
        assert child.answer(1).reason == DRIVER_GONE[code]


@pytest.mark.parametrize(
    ("code", "reason", "remedy"),
    [(9, "driver_not_loaded", "modprobe nvidia"), (4, "no_permission", "/dev/nvidia*"), (999, "unknown", "")],
)
def test_driver_that_does_not_start_has_a_remedy(driver: FakeDriver, code: int, reason: str, remedy: str) -> None:
    driver.fail("nvmlInitWithFlags", code=code)
    driver.write()
    with NvmlChild(driver.env) as child:
        answer = child.answer()
    assert answer.reason == reason
    assert remedy in answer.message


def test_missing_library_has_a_remedy(tmp_path: Path) -> None:
    with NvmlChild({"LD_LIBRARY_PATH": str(tmp_path)}) as child:
        answer = child.answer()
    if answer.reason != "library_not_found":
        pytest.skip("this machine has the library")
    assert "install the NVIDIA driver" in answer.message


def unloadable(directory: Path, how: str) -> None:
    """Create a libnvidia-ml.so.1 that the loader refuses."""
    library, source = directory / "libnvidia-ml.so.1", directory / "library.c"
    options = []
    if how == "symbol":
        source.write_text("extern int missing_symbol(void); int (*function)(void) = missing_symbol;")
    else:
        source.write_text("int nothing;")
    if how == "dependency":
        subprocess.run(["cc", "-shared", "-fPIC", "-o", str(directory / "libmissing.so"), str(source)], check=True)
        options = ["-Wl,--no-as-needed", f"-L{directory}", "-lmissing"]
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source), *options], check=True)
    content = bytearray(library.read_bytes())
    if how == "dependency":
        (directory / "libmissing.so").unlink()
    elif how == "machine":
        content[18] ^= 0xFF  # e_machine of the ELF header
    elif how == "damaged":
        content = content[:10]
    library.write_bytes(content)


@pytest.mark.needs("cc")
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("symbol", "undefined symbol: missing_symbol"),
        ("dependency", "libmissing.so: cannot open shared object file"),
        ("machine", "libnvidia-ml.so.1 is built for another architecture"),
        ("damaged", "file too short"),
    ],
)
def test_library_that_cannot_be_loaded_has_the_loaders_reason(tmp_path: Path, how: str, reason: str) -> None:
    unloadable(tmp_path, how)
    with NvmlChild({"LD_LIBRARY_PATH": str(tmp_path)}) as child:
        answer = child.answer()
    if answer.reason is None:
        pytest.skip("this machine has the library")
    assert answer.reason == "library_not_loadable"
    assert reason in answer.message
    assert "install the NVIDIA driver or" not in answer.message


@pytest.mark.needs("cc")
def test_serve_does_not_advise_to_install_a_driver_that_cannot_be_loaded(tmp_path: Path) -> None:
    unloadable(tmp_path, "symbol")
    command = [sys.executable, "-m", "gpumond", "serve", "--config", os.devnull, "--state-dir", str(tmp_path / "state")]
    environ = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    if any(drm_devices("/sys")):
        pytest.skip("this machine has a GPU of AMD or Intel")
    refused = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 1
    assert "undefined symbol: missing_symbol" in refused.stderr
    assert "no GPU driver" not in refused.stderr


@pytest.mark.parametrize("code", [4, 999])
def test_denial_by_a_device_cgroup_is_a_fault_of_its_own(driver: FakeDriver, code: int) -> None:
    driver.fail("nvmlInitWithFlags", code=code)
    driver.write()
    with NvmlChild(driver.env, no_device_access=True) as child:
        answer = child.answer()
    assert answer.reason == "device_access_lost"
    assert "recreate the container" in answer.message


@pytest.mark.parametrize(
    "version",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build\n",
    ],
)
def test_version_mismatch_names_both_versions(driver: FakeDriver, tmp_path: Path, version: str) -> None:
    driver.fail("nvmlInitWithFlags", code=18)
    driver.write()
    proc = tmp_path / "proc"
    (proc / "driver/nvidia").mkdir(parents=True)
    (proc / "driver/nvidia/version").write_text(version)
    with NvmlChild(driver.env, proc=proc) as child:
        answer = child.answer()
    assert answer.reason == "lib_rm_version_mismatch"
    assert "550.54.15" in answer.message
    assert "13.580.65.06" in answer.message
    assert "reboot" in answer.message


def test_descriptors_do_not_grow(driver: FakeDriver) -> None:
    driver.devices = machine(8, PIDS)
    driver.write()
    with NvmlChild(driver.env) as child:
        child.read(0)
        before = child.descriptors()
        for at in range(100):
            child.read(at)
        assert child.descriptors() == before
