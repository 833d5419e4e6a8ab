from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from gpumond.devices.drm import DrmSource, drm_devices
from gpumond.devices.impossible_values import MemoryCounts
from gpumond.devices.process.procfs import OpenDeviceNodes
from gpumond.facts.errors import SourceUnavailable
from gpumond.facts.snapshot import DeviceReading
from tests.helpers import trees
from tests.helpers.trees import MIB, ProcTree, SysTree

AMD, I915, XE = "/dev/dri/renderD128", "/dev/dri/renderD129", "/dev/dri/renderD130"


class Machine:
    """Machine with DRM devices and a manual clock."""

    def __init__(self, root: Path) -> None:
        self.sys, self.proc = SysTree(root / "sys"), ProcTree(root / "proc")
        self.now = 100.0
        self.answers: dict[str, MemoryCounts | OSError] = {}
        self.source = DrmSource(str(root / "sys"), str(root / "proc"), "/dev", lambda: self.now, self.query)

    def query(self, driver: str, node: str) -> MemoryCounts:
        answer = self.answers.get(node, MemoryCounts())
        if isinstance(answer, OSError):
            raise answer
        return answer

    def read(self) -> DeviceReading:
        """Return the only device."""
        (device,) = self.source.read().devices
        return device

    def faults(self) -> list[tuple[str, str | None]]:
        return [(fault.kind, fault.device_uuid) for fault in self.source.read().faults]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def used(device: DeviceReading) -> dict[int, int | None]:
    return {process.pid: process.used_bytes for process in device.processes or ()}


def test_missing_device_has_a_remedy(machine: Machine):
    for functions, reason in ([], "no_device"), (["0000:03:00.0"], "no_driver"):
        bus = machine.sys.root / "bus/pci/devices"
        bus.mkdir(parents=True, exist_ok=True)
        for function in functions:
            machine.sys.write(bus / function, {"class": "0x030000", "vendor": "0x1002"})
        with pytest.raises(SourceUnavailable, match="gpumond demo") as caught:
            machine.source.open()
        assert caught.value.reason == reason


def test_amdgpu_values_are_read(machine: Machine):
    machine.sys.amdgpu()
    machine.source.open()
    device = machine.read()
    assert (device.uuid, device.index, device.name) == ("AMD-f1a2b3c4d5e60718", 0, "Radeon PRO W7900")
    assert (device.vendor, device.pci_bus_id, device.unified) == ("amd", "0000:03:00.0", False)
    assert (device.size_bytes, device.used_bytes, device.free_bytes) == (1000 * MIB, 400 * MIB, 600 * MIB)
    sensors = device.sensors
    assert (sensors.gpu_utilization_ratio, sensors.memory_controller_utilization_ratio) == (0.37, 0.12)
    assert (sensors.sm_clock_hertz, sensors.memory_clock_hertz) == (2.124e9, 456e6)
    assert (sensors.gpu_temperature_celsius, sensors.memory_temperature_celsius) == (45.0, 60.0)
    assert (sensors.power_watts, sensors.power_limit_watts, sensors.fan_speed_ratio) == (87.0, 300.0, 0.2)
    assert machine.faults() == []


def test_i915_memory_is_queried(machine: Machine):
    machine.sys.i915()
    device = machine.read()
    assert (device.uuid, device.vendor, device.unified) == ("DRM-pci-0000:04:00.0", "intel", False)
    assert (device.size_bytes, device.used_bytes) == (None, None)
    assert device.sensors.sm_clock_hertz == 2350e6
    assert device.sensors.power_limit_watts == 190.0
    machine.answers[I915] = MemoryCounts(16 * MIB, 5 * MIB, 11 * MIB)
    device = machine.read()
    assert (device.size_bytes, device.used_bytes, device.free_bytes) == (16 * MIB, 5 * MIB, 11 * MIB)


def test_xe_values_are_read(machine: Machine):
    machine.sys.xe()
    device = machine.read()
    assert (device.uuid, device.size_bytes, device.used_bytes) == ("DRM-pci-0000:05:00.0", 2000 * MIB, None)
    sensors = device.sensors
    assert (sensors.sm_clock_hertz, sensors.gpu_temperature_celsius) == (1200e6, 47.0)
    assert (sensors.memory_temperature_celsius, sensors.energy_joules, sensors.power_watts) == (52.0, 7.0, None)


def test_power_is_energy_between_two_readings(machine: Machine):
    device = machine.sys.xe()
    machine.read()
    machine.now += 2.0
    machine.sys.write(device, {"hwmon/hwmon6/energy1_input": 107_000_000})
    assert machine.read().sensors.power_watts == 50.0


def test_integrated_device_never_shows_the_hosts_memory(machine: Machine):
    device = machine.sys.device("0000:00:02.0", "xe", 0, {"tile0/gt0/freq0/act_freq": 300})
    machine.proc.add(7, nodes={3: (AMD, trees.xe(1, 0, pci="0000:00:02.0").replace("vram0", "gtt"))})
    reading = machine.read()
    assert (reading.unified, reading.size_bytes, reading.used_bytes) == (True, None, None)
    assert used(reading) == {7: None}
    assert device.name == reading.pci_bus_id


def test_devices_are_listed_once_in_bus_order(machine: Machine):
    machine.sys.xe(number=0)
    machine.sys.amdgpu(number=2)
    machine.sys.i915(number=1)
    (machine.sys.root / "class/drm/version").write_text("drm 1.1.0 20060810\n")
    found = [(device.index, device.pci_bus_id) for device in machine.source.read().devices]
    assert found == [(0, "0000:03:00.0"), (1, "0000:04:00.0"), (2, "0000:05:00.0")]
    assert [sorted(card.nodes) for card in drm_devices(str(machine.sys.root))][1] == ["card1", "renderD129"]


def test_device_without_a_unique_id_is_named_after_its_slot(machine: Machine):
    machine.sys.amdgpu(unique_id="0000000000000000")
    assert machine.read().uuid == "DRM-pci-0000:03:00.0"


def test_name_comes_from_the_machines_list_of_devices(machine: Machine, tmp_path: Path):
    (tmp_path / "pci.ids").write_text(
        "# list\n1001  Other\n\t744c  Wrong\n1002  AMD\n\t744c  Navi 31\n\t\t1002 0e3b  Sub\n"
    )
    machine.sys.amdgpu(product_name="")
    (card,) = drm_devices(str(machine.sys.root))
    assert card.name((str(tmp_path / "none"), str(tmp_path / "pci.ids"))) == "Navi 31"
    assert card.name(()) == "amd 1002:744c"


def test_clients_of_a_process_add_up_and_descriptors_of_one_do_not(machine: Machine):
    machine.sys.amdgpu()
    same, other = trees.amdgpu(4, 100), trees.amdgpu(5, 30, busy=1)
    machine.proc.add(7, nodes={3: (AMD, same), 4: (AMD, same), 5: ("/dev/dri/card0", same), 6: (AMD, other)})
    device = machine.read()
    assert used(device) == {7: 130 * MIB}
    (process,) = device.processes or ()
    assert (process.comm, process.uid, process.start_ticks, process.kinds) == ("python", 1000, 500, ("graphics",))


def test_shared_descriptor_is_its_oldest_holders(machine: Machine):
    machine.sys.amdgpu()
    for pid, start_ticks in ((30, 700), (40, 600), (50, 800)):
        machine.proc.add(pid, start_ticks=start_ticks, nodes={3: (AMD, trees.amdgpu(4, 100))})
    assert used(machine.read()) == {40: 100 * MIB}


def test_client_counts_to_its_own_device(machine: Machine):
    machine.sys.amdgpu()
    machine.sys.xe()
    machine.proc.add(7, nodes={3: (AMD, trees.amdgpu(4, 100)), 4: (XE, trees.xe(4, 20, busy=1))})
    machine.proc.add(8, nodes={3: (AMD, trees.amdgpu(9, 1, pci="0000:99:00.0"))})
    amd, intel = machine.source.read().devices
    assert (used(amd), used(intel)) == ({7: 100 * MIB}, {7: 20 * MIB})
    assert (intel.processes or ())[0].kinds == ("compute",)


def test_renamed_device_node_of_a_container_is_identified(machine: Machine):
    machine.sys.amdgpu()
    machine.sys.xe()
    machine.proc.add(7, nodes={3: (AMD, trees.xe(4, 20))})
    amd, intel = machine.source.read().devices
    assert (used(amd), used(intel)) == ({}, {7: 20 * MIB})


def test_rocm_programs_count_once_without_their_descriptors(machine: Machine):
    machine.sys.amdgpu()
    machine.proc.add(7, nodes={3: (AMD, trees.amdgpu(4, 100))})
    machine.sys.kfd(7, 90 * MIB)
    machine.proc.add(8, "llama")
    machine.sys.kfd(8, 40 * MIB)
    device = machine.read()
    assert used(device) == {7: 100 * MIB, 8: 40 * MIB}
    assert [(p.comm, p.kinds) for p in device.processes or ()] == [
        ("python", ("compute", "graphics")),
        ("llama", ("compute",)),
    ]


def test_utilization_is_derived_from_busy_time(machine: Machine):
    machine.sys.i915()

    def run(busy: int) -> Any:
        machine.proc.add(7, nodes={3: (I915, trees.i915(4, 100, busy=busy))})
        machine.now += 1.0
        return machine.read().sensors.gpu_utilization_ratio

    assert [run(0), run(2_000_000_000), run(2_000_000_000)] == [None, 0.5, 0.0]


def test_hidden_processes_are_counted():
    """Reads the real /proc as a user other than root; kernel threads are ignored."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        if os.geteuid() == 0:
            os.setuid(65534)
        descriptors = OpenDeviceNodes(("/dev/dri/",), inspect_every=1)
        descriptors.read()
        os.write(writer, str(descriptors.hidden).encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as answer:
        hidden = int(answer.read())
    processes = [path for path in Path("/proc").glob("[0-9]*/cmdline") if path.read_bytes()]
    assert 0 < hidden <= len(processes) + 8


def test_processes_that_are_hidden_make_a_fault_and_no_wrong_number(machine: Machine):
    """With hidepid, other processes are invisible; their usage is unknown, and not zero."""
    machine.sys.i915()
    machine.proc.add(7, nodes={3: (I915, trees.i915(4, 100))})
    machine.proc.remove(1)
    for _ in range(2):
        machine.now += 1.0
        device = machine.read()
        assert used(device) == {7: 100 * MIB}
        assert device.sensors.gpu_utilization_ratio is None
    assert machine.faults() == [("processes_hidden", device.uuid)]


def test_answer_that_needs_permission_is_a_fault(machine: Machine):
    machine.sys.i915()
    machine.answers[I915] = PermissionError(13, "Permission denied")
    assert machine.faults() == [("no_permission", "DRM-pci-0000:04:00.0")]
    machine.answers[I915] = MemoryCounts(16 * MIB)
    assert machine.read().size_bytes == 16 * MIB
    assert machine.faults() == [("no_permission", "DRM-pci-0000:04:00.0")]


@pytest.mark.parametrize("text", ["-1", "banana", "", str(2**64), str(2000 * MIB)])
def test_impossible_value_makes_only_its_field_unknown(machine: Machine, text: str):
    device = machine.sys.amdgpu(mem_info_vram_used=text)
    reading = machine.read()
    assert (reading.size_bytes, reading.used_bytes) == (1000 * MIB, None)
    assert reading.sensors.power_watts == 87.0
    assert machine.faults() == [("impossible_value", reading.uuid)]
    (device / "gpu_busy_percent").unlink()
    (device / "gpu_busy_percent").mkdir()
    assert ("unreadable", reading.uuid) in machine.faults()


def test_sleeping_device_is_not_woken_up(machine: Machine):
    device = machine.sys.amdgpu(**{"power/runtime_status": "suspended"})
    (device / "mem_info_vram_used").unlink()
    (device / "mem_info_vram_used").mkdir()
    machine.proc.add(7, nodes={3: (AMD, trees.amdgpu(4, 100))})
    reading = machine.read()
    assert (reading.uuid, reading.used_bytes, reading.processes) == ("AMD-f1a2b3c4d5e60718", None, None)
    assert machine.faults() == []


def test_removed_device_is_lost_and_may_return(machine: Machine):
    machine.sys.amdgpu()
    machine.sys.xe()
    before = machine.source.read().devices
    node = machine.sys.root / "class/drm"
    (node / "card0").rename(node / "gone0")
    (node / "renderD128").rename(node / "gone128")
    assert [device.uuid for device in machine.source.read().devices] == ["DRM-pci-0000:05:00.0"]
    assert machine.faults() == [("lost", "AMD-f1a2b3c4d5e60718")]
    (node / "gone0").rename(node / "card0")
    assert [(d.uuid, d.index) for d in machine.source.read().devices] == [(d.uuid, d.index) for d in before]


def test_process_that_opens_the_device_later_is_found(machine: Machine):
    machine.sys.amdgpu()
    directory = machine.proc.add(7)
    assert used(machine.read()) == {}
    os.symlink(AMD, directory / "fd/3")
    (directory / "fdinfo/3").write_text(trees.amdgpu(4, 100))
    assert {7: 100 * MIB} in [used(machine.read()) for _ in range(10)]
    shutil.rmtree(directory)
    assert used(machine.read()) == {}


def test_many_readings_keep_no_descriptor_open(machine: Machine):
    machine.sys.amdgpu()
    machine.proc.add(7, nodes={3: (AMD, trees.amdgpu(4, 100))})
    machine.read()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(200):
        machine.read()
    assert len(os.listdir("/proc/self/fd")) == before


def shares(device: DeviceReading) -> dict[int, float | None]:
    return {process.pid: process.utilization_ratio for process in device.processes or ()}


def test_process_kinds_distinguish_use_from_holding_memory(machine: Machine):
    """A client counts from its second reading on, because its busy time starts at its own creation."""
    machine.sys.i915()
    machine.proc.add(7, nodes={3: (I915, trees.i915(1, 100, busy=5_000_000_000))})
    machine.proc.add(8, nodes={3: (I915, trees.i915(2, 100, busy=9_000_000_000))})
    assert shares(machine.read()) == {7: None, 8: None}
    machine.now += 2.0
    machine.proc.add(7, nodes={3: (I915, trees.i915(1, 100, busy=7_000_000_000))})  # the engine occurs four times
    machine.proc.add(9, nodes={3: (I915, trees.i915(3, 100, busy=1))})
    assert shares(machine.read()) == {7: 0.25, 8: 0.0, 9: None}


def test_utilization_of_kfd_processes_is_unknown(machine: Machine):
    machine.sys.amdgpu()
    machine.sys.kfd(7, 300 * MIB)
    machine.proc.add(7, nodes={3: (AMD, trees.amdgpu(1, 300))})
    machine.proc.add(8, nodes={3: (AMD, trees.amdgpu(2, 10, busy=1))})
    machine.read()
    machine.now += 1.0
    assert shares(machine.read()) == {7: None, 8: 0.0}
