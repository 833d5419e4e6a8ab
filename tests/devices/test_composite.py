from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gpumond.devices import CompositeSource
from gpumond.facts.errors import SourceUnavailable
from gpumond.facts.snapshot import DeviceReading, Fault, Reading, SourceState
from gpumond.tick.observe import observe
from tests.fakenvml import FakeDriver, machine as nvidia_machine
from tests.helpers.trees import SysTree
from tests.helpers.values import make_device


class Stub:
    """Source with configurable answers."""

    def __init__(self, name: str, *devices: DeviceReading, version: str | None = None) -> None:
        self.name, self.devices, self.version = name, devices, version
        self.reason = self.gone = ""
        self.is_open = False

    def open(self) -> None:
        if self.reason:
            raise SourceUnavailable(self.reason, f"no {self.name}")
        self.is_open = True

    def read(self) -> Reading:
        assert self.is_open
        if self.gone:
            raise SourceUnavailable(self.gone, "went away")
        return Reading(
            devices=self.devices,
            faults=(Fault(self.name, "k", "u", ""),),
            driver_version=f"driver of {self.name}",
            library_version=self.version,
        )

    def close(self) -> None:
        self.is_open = False


def put_on_bus(sys: Path, address: str, kind: str, vendor: str) -> None:
    """Add a PCI function to a tree with the layout of /sys."""
    function = sys / "bus/pci/devices" / address
    function.mkdir(parents=True)
    (function / "class").write_text(f"{kind}\n")
    (function / "vendor").write_text(f"{vendor}\n")


class Machine:
    def __init__(self, sys: Path) -> None:
        self.now, self.sys = 0.0, sys
        (sys / "bus/pci/devices").mkdir(parents=True)
        self.nvml = Stub("nvml", make_device("GPU-a", index=0, vendor="nvidia"), version="580.1")
        self.drm = Stub(
            "drm", make_device("AMD-a", index=0, vendor="amd"), make_device("DRM-b", index=1, vendor="intel")
        )
        self.every = CompositeSource([self.nvml, self.drm], lambda: self.now, str(sys))

    def indices(self) -> dict[str, int]:
        return {device.uuid: device.index for device in self.every.read().devices}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "sys")


def test_devices_of_all_vendors_have_distinct_indices(machine: Machine):
    machine.every.open()
    assert machine.indices() == {"GPU-a": 0, "AMD-a": 1, "DRM-b": 2}
    reading = machine.every.read()
    assert (reading.driver_version, reading.library_version) == ("driver of nvml, driver of drm", "580.1")
    assert [fault.source for fault in reading.faults] == ["nvml", "drm"]
    machine.every.close()
    assert not machine.nvml.is_open


def test_missing_source_is_a_fault_and_is_retried(machine: Machine):
    machine.nvml.reason = "driver_not_loaded"
    machine.every.open()
    assert machine.indices() == {"AMD-a": 0, "DRM-b": 1}
    assert Fault("nvml", "driver_not_loaded", None, "no nvml") in machine.every.read().faults
    machine.nvml.reason = ""
    machine.now += 31.0
    assert machine.indices() == {"GPU-a": 0, "AMD-a": 2, "DRM-b": 1}
    assert [fault.source for fault in machine.every.read().faults] == ["nvml", "drm"]


def test_reason_is_stated_if_no_source_opens(machine: Machine):
    put_on_bus(machine.sys, "0000:1b:00.0", "0x030200", "0x10de")
    machine.nvml.reason, machine.drm.reason = "driver_not_loaded", "no_device"
    with pytest.raises(SourceUnavailable, match="no nvml"):
        machine.every.open()


@pytest.mark.parametrize(
    ("address", "kind", "vendor", "gpu"),
    [
        ("0000:1b:00.0", "0x030200", "0x10de", True),
        ("0000:1b:00.0", "0x030000", "0x1002", True),
        ("0000:1b:00.0", "0x120000", "0x1002", True),
        ("0000:03:00.0", "0x038000", "0x8086", True),
        ("0000:00:02.0", "0x030000", "0x8086", False),
        ("0000:02:00.0", "0x030000", "0x1a03", False),
        ("0000:1b:00.1", "0x040300", "0x10de", False),
    ],
    ids=["3D", "VGA", "accelerator", "discrete Intel", "integrated Intel", "of a server's console", "its audio"],
)
def test_machine_without_a_gpu_has_no_device(machine: Machine, address: str, kind: str, vendor: str, gpu: bool):
    put_on_bus(machine.sys, address, kind, vendor)
    machine.nvml.reason, machine.drm.reason = "library_not_found", "no_device"
    with pytest.raises(SourceUnavailable) as caught:
        machine.every.open()
    assert caught.value.reason == ("library_not_found" if gpu else "no_device")


@pytest.mark.parametrize("sign", ["module/nvidia", "module/nvgpu", "module/amdgpu", "a bus that is unknown"])
def test_machine_with_a_loaded_driver_may_have_a_device(machine: Machine, sign: str):
    (machine.sys / sign).mkdir(parents=True)
    if not sign.startswith("module"):
        (machine.sys / "bus/pci/devices").rmdir()
    machine.nvml.reason, machine.drm.reason = "driver_not_loaded", "no_device"
    with pytest.raises(SourceUnavailable, match="no nvml"):
        machine.every.open()


def test_removed_driver_requests_a_new_process(machine: Machine):
    machine.every.open()
    machine.nvml.gone = "uninitialized"
    with pytest.raises(SourceUnavailable):
        machine.every.read()


def test_missing_source_does_not_affect_devices_of_others(machine: Machine):
    """Its fault has no device: a removed AMD device is forgotten, but not an NVIDIA device whose driver is unloaded."""
    up = SourceState(name="all", up=True, responsive=True)
    nvidia, amd, intel = (
        replace(device, source=source)
        for source, devices in (("nvml", machine.nvml.devices), ("drm", machine.drm.devices))
        for device in devices
    )
    gone = Fault("nvml", "driver_not_loaded", None, "no nvml")
    first = observe(None, up, Reading(devices=(nvidia, amd, intel)), (), 0.0, 0.0)
    second = observe(first, up, Reading(devices=(intel,), faults=(gone,)), (), 1.0, 1.0)
    assert [(device.uuid, device.up) for device in second.devices] == [("GPU-a", False), ("DRM-b", True)]


def test_devices_name_their_source(driver: FakeDriver, tmp_path: Path):
    driver.devices = nvidia_machine(1)
    driver.write()
    SysTree(tmp_path / "sys").amdgpu()
    (tmp_path / "proc").mkdir()
    program = (
        "import sys; from gpumond.devices import CompositeSource\n"
        "from gpumond.devices.nvml.source import NvmlSource\n"
        "from gpumond.devices.drm import DrmSource\n"
        "every = CompositeSource([NvmlSource(), DrmSource(sys.argv[1], sys.argv[2])]); every.open()\n"
        "print(*(f'{device.vendor}={device.source}' for device in every.read().devices))"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "sys"), str(tmp_path / "proc")]
    done = subprocess.run(command, env={**os.environ, **driver.env}, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["nvidia=nvml", "amd=drm"]
