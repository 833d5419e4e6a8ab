"""Limits of cgroups by driver 615 (a fake one) through the whole daemon: a container's limit, and its own partition."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.fakenvml import GIB, NOT_AVAILABLE, Device, FakeDriver, Process
from tests.helpers.running import RunningDaemon, until

Serve = Callable[..., RunningDaemon]
NAME = f"docker-{'a1' * 32}.scope"
UNIFIED = next((line.split()[1] for line in Path("/proc/mounts").read_text().splitlines() if " cgroup2 " in line), "")

pytestmark = pytest.mark.slow


@pytest.fixture
def program() -> Iterator[int]:
    """Run a program without an agent in the cgroup of a container."""
    cgroup = Path(UNIFIED, NAME)
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            cgroup.mkdir()
            (cgroup / "cgroup.procs").write_text(str(process.pid))
            yield process.pid
        finally:
            process.kill()
            process.wait()
            cgroup.rmdir()


@pytest.mark.skipif(not UNIFIED or not os.access(UNIFIED, os.W_OK), reason="needs root and cgroup v2")
def test_quota_limits_a_container_whose_program_has_no_agent(
    serve: Serve, driver: FakeDriver, program: int, tmp_path: Path
):
    driver.devices = [Device("GPU-0", used_bytes=6 * GIB, processes=[Process(program, 6 * GIB)])]
    driver.write()
    driver.limit(0, "/elsewhere")
    quota = {"name": "notebooks", "match": {"container": "a1a1*"}, "cgroup_limit": "8GiB"}
    config = tmp_path / "gpumond.yaml"
    config.write_text(yaml.safe_dump({"quotas": [quota], "interval": 0.2}))
    daemon = serve("--source", "nvml", "--config", str(config), environ=driver.env)
    until(lambda: driver.limits(0, f"/{NAME}") == (0, 8 * GIB))
    until(lambda: daemon.value("gpumond_cgroup_memory_limit_bytes", cgroup=f"/{NAME}") == 8 * GIB)
    (line,) = [line.split() for line in daemon.run("quota").stdout.splitlines() if NAME in line]
    assert line[-2:] == ["notebooks", f"/{NAME}"]
    (entry,) = [each for each in daemon.get("audit") if each["action"] == "cgroup.limit"]
    assert (entry["actor"], entry["detail"]["limit_bytes"]) == ("quota:notebooks", 8 * GIB)
    config.write_text("interval: 0.2\n")
    daemon.process.send_signal(signal.SIGHUP)
    until(lambda: driver.limits(0, f"/{NAME}") == (0, NOT_AVAILABLE))


def test_daemon_in_a_partition_says_so_and_its_ledger_adds_up(serve: Serve, driver: FakeDriver):
    own = Process(os.getpid(), 2 * GIB)
    driver.devices = [Device("GPU-0", used_bytes=20 * GIB, processes=[own], partition_total=16 * GIB)]
    driver.devices[0].partition_used = 2 * GIB
    driver.write()
    driver.limit(0, "/elsewhere")
    daemon = serve("--source", "nvml", "--interval", "0.2s", environ=driver.env)
    until(lambda: [each["kind"] for each in daemon.get("status")["conditions"]] == ["memory_partition"])
    (device,) = daemon.get("devices")
    assert (device["size_bytes"], device["partition_bytes"]) == (driver.devices[0].total_bytes, 16 * GIB)
    assert sum(line["used_bytes"] for line in daemon.get("ledger")["lines"]) == device["used_bytes"]
    assert "16.0 GiB" in daemon.run("doctor").stdout
