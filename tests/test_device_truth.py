"""What the daemon says of NVIDIA devices, and of what it cannot read: /metrics and /api/v1/status."""

from __future__ import annotations

from collections.abc import Callable

from tests.fakenvml import FakeDriver, machine
from tests.running import RunningDaemon, until

Serve = Callable[..., RunningDaemon]
XID = 8


def start(serve: Serve, driver: FakeDriver) -> RunningDaemon:
    driver.write()
    daemon = serve("--source", "nvml", "--interval", "0.2", environ=driver.env)
    until(lambda: daemon.value("gpumond_device_power_limit_watts", gpu="0"))
    return daemon


def test_every_sensor_has_its_series(serve: Serve, driver: FakeDriver):
    driver.devices = machine(1)
    said = driver.devices[0]
    daemon = start(serve, driver)
    expected = {
        ("bar1_used_bytes", ""): said.bar1_used,
        ("temperature_celsius", "memory"): said.memory_temperature,
        ("temperature_limit_celsius", "shutdown"): said.shutdown_temperature,
        ("ecc_errors_total", "uncorrected aggregate"): said.ecc_uncorrected_aggregate,
        ("throttle", "sw_power_cap"): 1,
        ("throttle", "gpu_idle"): 0,
        ("compute_mode", "default"): 1,
        ("persistence_mode", ""): 0,
        ("pcie_receive_bytes_per_second", ""): (said.pcie_receive or 0) * 1000,
        ("pcie_generation_max", ""): said.pcie_generation_max,
        ("remapped_rows", "uncorrectable"): said.remapped_uncorrectable,
        ("nvlink_errors_total", "crc_flit"): said.nvlink_crc_flit,
        ("memory_unified", ""): 0,
    }
    series = daemon.series()
    own = {"uuid", "gpu"}
    found = {
        (name.removeprefix("gpumond_device_"), " ".join(v for k, v in sorted(labels) if k not in own)): value
        for (name, labels), value in series.items()
    }
    assert {key: found.get(key) for key in expected} == expected
    info = {"source": "nvml", "driver_version": "580.65.06", "library_version": "13.580.65.06", "cuda_version": "13.0"}
    assert daemon.value("gpumond_driver_info", **info) == 1


def test_what_cannot_be_read_is_named_counted_and_gone_when_it_can(serve: Serve, driver: FakeDriver):
    driver.devices = machine(2)
    daemon = start(serve, driver)
    uuid = driver.devices[1].uuid
    driver.fail("nvmlDeviceGetPowerUsage", 1, code=10)
    driver.write()
    until(lambda: daemon.value("gpumond_device_fault", uuid=uuid, kind="timeout"))
    assert daemon.value("gpumond_faults_total", source="nvml", kind="timeout")
    assert daemon.value("gpumond_device_power_watts", uuid=uuid) is None
    (fault,) = daemon.get("status")["faults"]
    assert (fault["device_uuid"], fault["kind"]) == (uuid, "timeout")
    driver.heal()
    driver.write()
    until(lambda: daemon.value("gpumond_device_power_watts", uuid=uuid))
    assert daemon.value("gpumond_device_fault", uuid=uuid) is None


def test_why_a_source_is_down_is_a_fault_too(serve: Serve, driver: FakeDriver):
    driver.fail("nvmlInitWithFlags", code=18)
    driver.write()
    daemon = serve("--source", "nvml", environ=driver.env)
    reason = "lib_rm_version_mismatch"
    until(lambda: daemon.value("gpumond_faults_total", source="nvml", kind=reason))
    assert [(fault["device_uuid"], fault["kind"]) for fault in daemon.get("status")["faults"]] == [(None, reason)]


def test_the_xid_that_takes_a_device_down_is_shown(serve: Serve, driver: FakeDriver):
    driver.devices = machine(2)
    daemon = start(serve, driver)
    own = {"uuid": driver.devices[1].uuid, "gpu": "1", "xid": "79"}
    driver.lose(1)
    driver.devices[1].events = [(XID, 79)]
    driver.write()
    until(lambda: daemon.value("gpumond_device_up", gpu="1") == 0)
    until(lambda: daemon.value("gpumond_device_power_watts", gpu="1") is None)
    assert daemon.value("gpumond_device_xid_errors_total", **own) == 1
    assert (daemon.value("gpumond_device_xid_last_seen_timestamp_seconds", **own) or 0) > 1e9
    assert daemon.value("gpumond_device_fault", uuid=own["uuid"], kind="gpu_is_lost") == 1
    assert b"DCGM_FI_DEV_XID_ERRORS" in daemon.request("/metrics?compat=dcgm")[1]
    assert b"gpumond_driver_up" not in daemon.request("/metrics?compat=dcgm")[1]
    assert daemon.request("/metrics?compat=nvitop")[0] == 422


def test_dcgm_names_beside_ours_where_the_configuration_says_so(serve: Serve, driver: FakeDriver):
    driver.devices = machine(1)
    driver.write()
    daemon = serve("--source", "nvml", environ={**driver.env, "GPUMOND_COMPAT": "dcgm"})
    until(lambda: daemon.value("DCGM_FI_DEV_GPU_TEMP", device="nvidia0") == driver.devices[0].temperature)
    assert daemon.value("gpumond_driver_up") == 1
