from __future__ import annotations

from dataclasses import replace

from tests.devices.nvml.child import NvmlChild, by_uuid, kinds, used_by_pid
from tests.fakenvml import GIB, Device, FakeDriver, Process, machine

PIDS = range(1, 65)


def test_lost_device_is_a_fault_until_it_is_back_and_others_continue(driver: FakeDriver) -> None:
    driver.devices = machine(8, PIDS)
    driver.write()
    lost = driver.devices[3].uuid
    with NvmlChild(driver.env) as child:
        assert len(child.read(0).devices) == 8
        driver.lose(3)
        driver.write()
        for at in range(1, 300):
            reading = child.read(at)
            assert set(by_uuid(reading)) == {device.uuid for device in driver.devices} - {lost}
            assert kinds(reading) == {(lost, "gpu_is_lost")}
        driver.heal()
        driver.write()
        readings = [child.read(at) for at in range(300, 311)]
    assert len(readings[-1].devices) == 8
    assert readings[-1].faults == ()


def test_lost_device_is_searched_for_with_growing_pauses(driver: FakeDriver) -> None:
    driver.devices = machine(1)
    driver.write()
    driver.count_calls()
    with NvmlChild(driver.env) as child:
        child.read(0)
        driver.lose(0)
        driver.write()
        driver.calls()
        scans = []
        for at in range(1, 60):
            child.read(at)
            if driver.calls()["nvmlDeviceGetCount_v2"]:
                scans.append(at)
    assert scans == [2, 3, 5, 9, 17, 27, 37, 47, 57]


def test_handle_of_a_removed_device_is_never_used_again(driver: FakeDriver) -> None:
    """A stale handle crashes, as with a real driver."""
    driver.devices = machine(8, PIDS)
    driver.crash(device="stale")
    driver.write()
    with NvmlChild(driver.env) as child:
        child.read(0)
        driver.lose(5)
        driver.write()
        child.read(1)
        gone = driver.devices.pop(5)
        driver.write()
        for at in range(2, 30):
            assert kinds(child.read(at)) == {(gone.uuid, "gpu_is_lost")}


def test_device_that_is_no_longer_enumerated_is_a_fault_until_it_is_back(driver: FakeDriver) -> None:
    driver.devices = machine(8, PIDS)
    driver.write()
    with NvmlChild(driver.env) as child:
        child.read(0)
        gone = driver.devices.pop(5)
        driver.write()
        for at in (10, 11, 12, 100):
            reading = child.read(at)
            assert kinds(reading) == {(gone.uuid, "vanished")}
            assert set(by_uuid(reading)) == {device.uuid for device in driver.devices}
        driver.devices.insert(5, gone)
        driver.write()
        reading = child.read(120)
        assert [device.uuid for device in reading.devices] == [device.uuid for device in driver.devices]
        assert reading.faults == ()


def test_replaced_device_is_no_fault(driver: FakeDriver) -> None:
    driver.devices = machine(2)
    driver.write()
    with NvmlChild(driver.env) as child:
        child.read(0)
        driver.lose(1)
        driver.write()
        assert kinds(child.read(1)) == {(driver.devices[1].uuid, "gpu_is_lost")}
        driver.heal()
        driver.devices[1] = replace(driver.devices[1], uuid="GPU-another")
        driver.write()
        reading = child.read(20)
        assert set(by_uuid(reading)) == {driver.devices[0].uuid, "GPU-another"}
        assert reading.faults == ()


def test_new_device_appears(driver: FakeDriver) -> None:
    driver.devices = machine(7)
    driver.write()
    with NvmlChild(driver.env) as child:
        child.read(0)
        driver.devices = machine(8)
        driver.write()
        assert len(child.read(9.9).devices) == 7
        assert len(child.read(10).devices) == 8


def test_permanent_failure_of_memory_loses_the_device(driver: FakeDriver) -> None:
    driver.devices = machine(2)
    driver.fail("nvmlDeviceGetMemoryInfo_v2", 0, code=999)
    driver.write()
    lost = driver.devices[0].uuid
    with NvmlChild(driver.env) as child:
        readings = [child.read(at) for at in range(6)]
        driver.heal()
        driver.write()
        assert len(child.read(20).devices) == 2
    assert [lost in by_uuid(reading) for reading in readings] == [True, True, False, False, False, False]
    assert all((lost, "unknown") in kinds(reading) for reading in readings)


def test_mig_instances_are_devices_in_addition_to_their_parent(driver: FakeDriver) -> None:
    parent = machine(1)[0]
    parent.mig_mode = 1
    parent.gpu_utilization = None
    parent.instances = [
        Device(
            f"MIG-{i}",
            name="NVIDIA H200 MIG 1g.18gb",
            total_bytes=18 * GIB,
            used_bytes=(i + 1) * GIB + 17,
            gpu_instance=i + 7,
            processes=[Process(100 + i, (i + 1) * GIB, gpu_instance=i + 7, compute_instance=0)],
        )
        for i in range(3)
    ]
    driver.devices = [parent]
    driver.write()
    with NvmlChild(driver.env) as child:
        reading = child.read(0)
        assert [device.uuid for device in reading.devices] == [parent.uuid, "MIG-0", "MIG-1", "MIG-2"]
        assert used_by_pid(reading.devices[0]) == {100: GIB, 101: 2 * GIB, 102: 3 * GIB}
        for i, device in enumerate(reading.devices[1:]):
            assert (device.parent_uuid, device.index, device.pci_bus_id) == (parent.uuid, 0, parent.pci_bus_id)
            assert (device.size_bytes, device.used_bytes) == (18 * GIB, (i + 1) * GIB + 17)
            assert used_by_pid(device) == {100 + i: (i + 1) * GIB}
        assert reading.faults == ()

        del parent.instances[1]
        driver.write()
        child.read(1)  # its memory fails once, after which the source searches
        reading = child.read(2)
        assert [device.uuid for device in reading.devices] == [parent.uuid, "MIG-0", "MIG-2"]
        assert reading.faults == ()

        driver.lose(parent.uuid)
        driver.write()
        reading = child.read(3)
        assert reading.devices == ()
        assert kinds(reading) == {(uuid, "gpu_is_lost") for uuid in (parent.uuid, "MIG-0", "MIG-2")}
