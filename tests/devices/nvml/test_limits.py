"""Limits of device memory by cgroup, on a fake driver of version 615."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpumond.devices.process.metadata import limitable_cgroup
from gpumond.facts.snapshot import CgroupLimit, CgroupLimitChange, Reading, Snapshot
from gpumond.tick.ledger import make_ledger
from gpumond.tick.reading_conditions import conditions
from tests.devices.nvml.child import NvmlChild, kinds
from tests.fakenvml import GIB, NOT_AVAILABLE, Device, FakeDriver, Process, machine
from tests.helpers.trees import ProcTree
from tests.helpers.values import make_snapshot

ID = "a1" * 32
POD = "/kubepods.slice/kubepods-pod1.slice"
CONTAINER = f"{POD}/cri-containerd-{ID}.scope"
SERVICE = "/system.slice/train.service"


@pytest.fixture
def proc(tmp_path: Path) -> ProcTree:
    tree = ProcTree(tmp_path / "proc")
    tree.add(10, cgroup=f"0::{CONTAINER}/init\n")
    tree.add(11, cgroup=f"0::{CONTAINER}\n")
    tree.add(12, cgroup=f"0::{SERVICE}\n")
    tree.add(13, cgroup="0::/../outside\n")
    belongs(tree, "/system.slice/gpumond.service")
    return tree


def belongs(tree: ProcTree, cgroup: str) -> None:
    """Place the daemon in a cgroup."""
    (tree.root / "self").mkdir(exist_ok=True)
    (tree.root / "self/cgroup").write_text(f"0::{cgroup}\n")


@pytest.fixture
def child(driver: FakeDriver, proc: ProcTree) -> Iterator[NvmlChild]:
    processes = [Process(pid, 10 * GIB) for pid in (10, 11, 12, 13)]
    driver.devices = [Device("GPU-0", used_bytes=41 * GIB, processes=processes)]
    driver.write()
    with NvmlChild(driver.env, proc.root) as child:
        yield child


def limits(reading: Reading) -> dict[str, CgroupLimit]:
    return {each.cgroup: each for each in reading.devices[0].cgroup_limits}


def change(limit: int | None, before: int | None = None, cgroup: str = CONTAINER) -> CgroupLimitChange:
    return CgroupLimitChange(device_uuid="GPU-0", cgroup=cgroup, limit_bytes=limit, before_bytes=before)


@pytest.mark.parametrize(
    ("text", "cgroup"),
    [
        (f"0::{CONTAINER}/nested\n", CONTAINER),
        (f"0::/libpod_parent/libpod-conmon-{ID}.scope\n", f"/libpod_parent/libpod-conmon-{ID}.scope"),
        (f"12:memory:/docker/{ID}\n0::{SERVICE} (deleted)\n", SERVICE),
        ("0::/\n", None),
        ("0::/../other\n", None),
        ("12:memory:/docker\n", None),
    ],
)
def test_cgroup_of_a_process_is_that_of_its_container(text: str, cgroup: str | None):
    assert limitable_cgroup(text) == cgroup


def test_limits_of_the_cgroups_of_processes_are_read(driver: FakeDriver, child: NvmlChild):
    driver.limit(0, POD, soft=GIB, hard=24 * GIB, used=20 * GIB)
    assert limits(child.read()) == {
        CONTAINER: CgroupLimit(
            cgroup=CONTAINER,
            pids=(10, 11),
            limit_bytes=24 * GIB,
            guaranteed_bytes=GIB,
            used_bytes=20 * GIB,
        ),
        SERVICE: CgroupLimit(cgroup=SERVICE, pids=(12,)),
    }


def test_limit_of_the_devices_size_is_none(driver: FakeDriver, child: NvmlChild):
    driver.limit(0, SERVICE, hard=driver.devices[0].total_bytes or 0, used=GIB)
    assert limits(child.read())[SERVICE] == CgroupLimit(cgroup=SERVICE, pids=(12,))


def test_older_driver_has_no_limits_and_is_asked_once(driver: FakeDriver, proc: ProcTree):
    driver.devices = machine(2, [10, 12])
    driver.write()
    driver.count_calls()
    with NvmlChild(driver.env, proc.root) as child:
        first, second = child.read(0), child.read(1, change(GIB))
    assert [device.cgroup_limits for device in (*first.devices, *second.devices)] == [()] * 4
    assert first.faults == second.faults == ()
    calls = driver.calls()
    assert (calls["nvmlDeviceGetMemoryLimits_v1"], calls["nvmlDeviceSetMemoryLimits_v1"]) == (1, 0)


def test_thousand_limits_are_read_back_as_they_were_set(driver: FakeDriver, child: NvmlChild):
    driver.limit(0, "/elsewhere")
    chosen, before = random.Random(615), dict.fromkeys((CONTAINER, SERVICE))
    for at in range(500):
        wanted = {cgroup: chosen.choice((None, chosen.randrange(1, 140 * GIB))) for cgroup in before}
        reading = child.read(at, *(change(wanted[cgroup], before[cgroup], cgroup) for cgroup in before))
        assert {cgroup: each.limit_bytes for cgroup, each in limits(reading).items()} == wanted
        assert reading.faults == ()
        before = wanted


def test_limit_of_another_owner_is_never_changed(driver: FakeDriver, child: NvmlChild):
    driver.limit(0, CONTAINER, hard=7 * GIB)
    driver.limit(0, SERVICE, soft=GIB)
    reading = child.read(0, change(GIB), change(GIB, cgroup=SERVICE))
    assert driver.limits(0, CONTAINER) == (0, 7 * GIB)
    assert driver.limits(0, SERVICE) == (GIB, NOT_AVAILABLE)
    assert reading.faults == ()


def test_refused_change_is_a_fault_until_it_is_made(driver: FakeDriver, child: NvmlChild):
    driver.limit(0, "/elsewhere")
    driver.fail("nvmlDeviceSetMemoryLimits_v1", code=4)
    driver.write()
    assert kinds(child.read(0, change(GIB))) == kinds(child.read(1)) == {("GPU-0", "limit_refused")}
    driver.heal()
    driver.write()
    reading = child.read(2, change(GIB))
    assert (reading.faults, limits(reading)[CONTAINER].limit_bytes) == ((), GIB)


def test_mig_instances_have_no_limits(driver: FakeDriver, proc: ProcTree):
    instance = Device("MIG-0", total_bytes=20 * GIB, processes=[Process(12, GIB, gpu_instance=1)])
    driver.devices = [Device("GPU-0", mig_mode=1, instances=[instance])]
    driver.write()
    driver.limit(0, SERVICE, hard=GIB)
    with NvmlChild(driver.env, proc.root) as child:
        device, part = child.read().devices
    assert (part.cgroup_limits, part.partition_bytes, device.partition_bytes) == ((), None, None)


def snapshot_of(reading: Reading) -> Snapshot:
    return make_snapshot(*(replace(device, vendor="nvidia") for device in reading.devices))


@pytest.mark.parametrize("visible", [True, False], ids=["own limit", "only by size"])
def test_daemon_in_a_partition_says_so_and_its_ledger_adds_up(
    driver: FakeDriver, proc: ProcTree, child: NvmlChild, visible: bool
):
    (whole,) = driver.devices
    whole.partition_total, whole.partition_used = 16 * GIB, GIB
    driver.write()
    if visible:
        driver.limit(0, "/gpumond", hard=16 * GIB)
        belongs(proc, "/gpumond")
    else:
        driver.limit(0, "/elsewhere")
    reading = child.read()
    (device,) = reading.devices
    assert (device.size_bytes, device.partition_bytes) == (whole.total_bytes, 16 * GIB)
    assert (device.used_bytes, device.reserved_bytes) == (whole.used_bytes + whole.reserved_bytes, None)
    snapshot = snapshot_of(reading)
    assert [each.kind for each in conditions(snapshot)] == ["memory_partition"]
    ledger = make_ledger(snapshot)
    assert sum(line.used_bytes for line in ledger.lines) == device.used_bytes
    assert [each.overcount_bytes for each in ledger.overcounts] == [0]
    whole.partition_total = whole.partition_used = None
    driver.write()
    belongs(proc, "/system.slice/gpumond.service")
    (outside,) = child.read(1).devices
    assert (outside.used_bytes, outside.partition_bytes) == (whole.used_bytes, None)
