"""States of NVIDIA devices, and facts that cannot be read, in /metrics and /api/v1/status."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpumond.devices.process.metadata import parse_placement
from gpumond.facts.errors import CONDITION_REMEDIES, FAULT_REMEDIES
from gpumond.host.machine import in_private_pid_namespace
from tests.fakenvml import GIB, Device, FakeDriver, Process, machine
from tests.helpers.running import RunningDaemon, until

Serve = Callable[..., RunningDaemon]
Xid = 8


@pytest.fixture(scope="module")
def two(nvml_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningDaemon, FakeDriver]]:
    """A daemon on two devices, the second of which is lost in the last test that uses it."""
    directory = tmp_path_factory.mktemp("two")
    driver = FakeDriver(directory, nvml_library, machine(2))
    driver.write()
    with RunningDaemon(directory / "d", "--source", "nvml", "--interval", "0.2s", environ=driver.env) as daemon:
        until(lambda: daemon.value("gpumond_device_power_limit_watts", gpu="0"))
        yield daemon, driver


def test_sensors_each_have_a_series(two: tuple[RunningDaemon, FakeDriver]):
    daemon, driver = two
    device = driver.devices[0]
    expected = {
        ("bar1_used_bytes", ""): device.bar1_used,
        ("temperature_celsius", "memory"): device.memory_temperature,
        ("temperature_limit_celsius", "shutdown"): device.shutdown_temperature,
        ("ecc_errors_total", "uncorrected aggregate"): device.ecc_uncorrected_aggregate,
        ("throttle", "sw_power_cap"): 1,
        ("throttle", "gpu_idle"): 0,
        ("compute_mode", "default"): 1,
        ("persistence_mode", ""): 0,
        ("pcie_receive_bytes_per_second", ""): (device.pcie_receive or 0) * 1000,
        ("pcie_generation_max", ""): device.pcie_generation_max,
        ("remapped_rows", "uncorrectable"): device.remapped_uncorrectable,
        ("nvlink_errors_total", "crc_flit"): device.nvlink_crc_flit,
        ("memory_unified", ""): 0,
    }
    series = daemon.series()
    own = {"uuid", "gpu"}
    found = {
        (name.removeprefix("gpumond_device_"), " ".join(v for k, v in sorted(labels) if k not in own)): value
        for (name, labels), value in series.items()
        if dict(labels).get("gpu") == "0"
    }
    assert {key: found.get(key) for key in expected} == expected
    info = {"source": "nvml", "driver_version": "580.65.06", "library_version": "13.580.65.06", "cuda_version": "13.0"}
    assert daemon.value("gpumond_driver_info", **info) == 1


def test_unreadable_sensor_is_a_fault_that_counts_once_until_it_is_readable(two: tuple[RunningDaemon, FakeDriver]):
    daemon, driver = two
    uuid = driver.devices[1].uuid
    driver.fail("nvmlDeviceGetPowerUsage", 1, code=10)
    driver.write()
    until(lambda: daemon.value("gpumond_device_fault", uuid=uuid, kind="timeout"))
    assert daemon.value("gpumond_device_power_watts", uuid=uuid) is None
    seq = daemon.get("status")["snapshot_seq"]
    until(lambda: daemon.get("status")["snapshot_seq"] > seq + 3)
    assert daemon.value("gpumond_faults_total", source="nvml", kind="timeout") == 1
    (fault,) = daemon.get("status")["faults"]
    assert (fault["device_uuid"], fault["kind"], fault["remedy"]) == (uuid, "timeout", FAULT_REMEDIES["timeout"])
    driver.heal()
    driver.write()
    until(lambda: daemon.value("gpumond_device_power_watts", uuid=uuid))
    assert daemon.value("gpumond_device_fault", uuid=uuid) is None


def test_source_that_is_down_is_a_fault_with_its_reason(serve: Serve, driver: FakeDriver):
    driver.fail("nvmlInitWithFlags", code=18)
    driver.write()
    daemon = serve("--source", "nvml", environ=driver.env)
    reason = "lib_rm_version_mismatch"
    until(lambda: daemon.value("gpumond_faults_total", source="nvml", kind=reason))
    assert [(fault["device_uuid"], fault["kind"]) for fault in daemon.get("status")["faults"]] == [(None, reason)]


CONDITIONS_OF = {
    "vgpu": Device("GPU-0", virtualization=2),
    "coherent_memory": Device("GPU-1", addressing=2, numa_node=8),
    "mps": Device("GPU-2", used_bytes=GIB, processes=[Process(os.getpid(), GIB, ("mps",))]),
}


def test_conditions_are_in_metrics_status_and_doctor(serve: Serve, driver: FakeDriver):
    driver.devices = [*CONDITIONS_OF.values()]
    driver.write()
    daemon = serve("--source", "nvml", "--interval", "0.2s", environ=driver.env)
    until(lambda: daemon.value("gpumond_device_condition", condition="mps"))
    stated = daemon.get("status")["conditions"]
    shown = {command: daemon.run(command).stdout for command in ("doctor", "status")}
    for index, (condition, device) in enumerate(CONDITIONS_OF.items()):
        assert daemon.value("gpumond_device_condition", uuid=device.uuid, gpu=str(index), condition=condition)
        assert {
            "device_uuid": device.uuid,
            "kind": condition,
            "remedy": CONDITION_REMEDIES[condition],
            "detail": "",
        } in stated
        for command, name in (("doctor", device.uuid), ("status", f"GPU {index}")):
            assert f"{name}: {condition}" in shown[command]
            assert CONDITION_REMEDIES[condition] in re.sub(r"(GPUMOND_\w+=\S+ )+", "", shown[command])
    sensors = daemon.get("devices")[1]["sensors"]
    assert (sensors["addressing_mode"], sensors["numa_node"]) == ("ats", 8)


def test_idle_process_is_distinguished_from_an_active_one(serve: Serve, driver: FakeDriver):
    """Two processes on a busy device, both sampled by the driver."""
    own, other = os.getpid(), os.getppid()
    processes = [Process(own, GIB, utilization=97), Process(other, GIB)]
    driver.devices = [Device("GPU-0", used_bytes=2 * GIB, gpu_utilization=97, process_sampling=1, processes=processes)]
    driver.write()
    daemon = serve("--source", "nvml", "--interval", "0.2s", environ=driver.env)
    until(lambda: daemon.value("gpumond_process_utilization_ratio", pid=str(other)) == 0)
    until(lambda: (idle(daemon)[other] or 0) > 0)
    assert idle(daemon)[own] == 0
    assert daemon.value("gpumond_process_utilization_ratio", uuid="GPU-0", gpu="0", pid=str(own)) == 0.97
    assert daemon.value("gpumond_device_idle_seconds", uuid="GPU-0", gpu="0") == 0
    driver.devices[0].gpu_utilization = 0
    driver.write()
    until(lambda: daemon.value("gpumond_device_idle_seconds", uuid="GPU-0", gpu="0"))


def test_orphan_is_named_with_its_remedy(serve: Serve, driver: FakeDriver, tmp_path: Path):
    """A program whose shell has ended, listed by the driver."""
    pid_file = tmp_path / "pid"
    script = f"exec 3<&0; sh -c 'echo $$ > {pid_file}.new; mv {pid_file}.new {pid_file}; exec cat' <&3 & exit 0"
    read, write = os.pipe()
    with os.fdopen(write, "wb"):
        with os.fdopen(read, "rb") as stdin:
            subprocess.run(
                ["sh", "-c", script], stdin=stdin, stdout=subprocess.DEVNULL, start_new_session=True, check=True
            )
        until(pid_file.exists)
        pid = int(pid_file.read_text())
        driver.devices = [Device("GPU-0", used_bytes=GIB, processes=[Process(pid, GIB)])]
        driver.write()
        daemon = serve("--source", "nvml", "--interval", "0.2s", environ=driver.env)
        until(lambda: daemon.value("gpumond_process_memory_used_bytes", pid=str(pid)))
        (process,) = daemon.get("processes")
        unit = parse_placement(Path("/proc/self/cgroup").read_text()).unit
        adopted = unit is not None and not unit.startswith("session-")  # the service that runs the tests adopts it
        assert process["orphaned"] is not adopted
        for command in ("status", "doctor"):
            output = daemon.run(command).stdout
            assert (f"pid {pid} (cat) has lost its parent" in output) is not adopted
            assert (f"kill {pid}" in output) is not adopted


def idle(daemon: RunningDaemon) -> dict[int, float | None]:
    return {process["pid"]: process["idle_seconds"] for process in daemon.get("processes")}


@pytest.mark.parametrize(
    ("around", "is_private"), [([], False), (["unshare", "--pid", "--fork", "--mount-proc"], True)]
)
def test_private_pid_namespace_is_in_metrics_and_status(
    serve: Serve, driver: FakeDriver, around: list[str], is_private: bool
):
    if around and subprocess.run([*around, "true"], capture_output=True).returncode:
        pytest.skip("no new PID namespace may be made here")
    if not around and in_private_pid_namespace():
        pytest.skip("the tests run in a PID namespace of their own")
    driver.devices = machine(1)
    driver.write()
    daemon = serve("--source", "nvml", "--interval", "0.2s", environ=driver.env, around=around)
    until(lambda: daemon.value("gpumond_private_pid_namespace") == is_private)
    until(lambda: daemon.get("devices"))
    status = daemon.get("status")
    assert status["private_pid_namespace"] is is_private
    assert ("private_pid_namespace" in [condition["kind"] for condition in status["conditions"]]) is is_private
    if around:  # unshare does not pass signals on
        parent = daemon.process.pid
        os.kill(int(Path(f"/proc/{parent}/task/{parent}/children").read_text()), signal.SIGTERM)
        daemon.process.wait(timeout=20)


def test_xid_error_of_a_lost_device_is_shown(two: tuple[RunningDaemon, FakeDriver]):
    daemon, driver = two
    own = {"uuid": driver.devices[1].uuid, "gpu": "1", "xid": "79"}
    driver.lose(1)
    driver.devices[1].events = [(Xid, 79)]
    driver.write()
    until(lambda: daemon.value("gpumond_device_up", gpu="1") == 0)
    until(lambda: daemon.value("gpumond_device_power_watts", gpu="1") is None)
    assert daemon.value("gpumond_device_xid_errors_total", **own) == 1
    assert (daemon.value("gpumond_device_xid_last_seen_timestamp_seconds", **own) or 0) > 1e9
    assert daemon.value("gpumond_device_fault", uuid=own["uuid"], kind="gpu_is_lost") == 1
    assert b"\nDCGM_FI_DEV_XID_ERROR{" in daemon.request("/metrics?compat=dcgm")[1]
    assert b"\nDCGM_FI_DEV_XID_ERRORS{" in daemon.request("/metrics?compat=dcgm-4.8")[1]
    assert b"gpumond_driver_up" not in daemon.request("/metrics?compat=dcgm")[1]
    assert daemon.request("/metrics?compat=nvitop")[0] == 422


def test_dcgm_names_are_added_if_configured(serve: Serve, driver: FakeDriver):
    driver.devices = machine(1)
    driver.write()
    daemon = serve("--source", "nvml", environ={**driver.env, "GPUMOND_COMPAT": "dcgm"})
    until(lambda: daemon.value("DCGM_FI_DEV_GPU_TEMP_CELSIUS", device="nvidia0") == driver.devices[0].temperature)
    assert daemon.value("gpumond_driver_up") == 1
