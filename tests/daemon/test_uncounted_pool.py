"""A program whose allocator does not count live bytes, from its report to every surface that shows it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from gpumond.facts.errors import CONDITIONS
from gpumond.facts.messages import Hello, Report, encode
from tests.fakenvml import Device, FakeDriver, Process
from tests.helpers.agents import GIB
from tests.helpers.running import RunningDaemon, until
from tests.helpers.values import make_pool


def test_uncounted_pool_has_a_share_and_a_remedy_everywhere(serve: Callable[..., RunningDaemon], driver: FakeDriver):
    driver.devices = [Device("GPU-0", used_bytes=6 * GIB, processes=[Process(os.getpid(), 5 * GIB)])]
    driver.write()
    daemon = serve("--source", "nvml", "--interval", "0.2s", environ=driver.env)
    pool = make_pool("GPU-0", allocator="rmm", live_bytes=None, held_bytes=4 * GIB)
    with socket.socket(socket.AF_UNIX) as agent:
        agent.connect(str(daemon.socket))
        agent.sendall(encode(Hello("etl")) + encode(Report(frameworks=("rmm 26.10.00",), pools=(pool,))))
        until(lambda: [each for each in daemon.get("processes") if each["opaque_bytes"] == 4 * GIB])
        (process,) = daemon.get("processes")
        shares = [process[f"{name}_bytes"] for name in ("live", "cached", "stranded", "overhead", "opaque")]
        assert shares == [None, None, None, GIB, 4 * GIB]
        frame = daemon.get("frame")
        assert sum(line["used_bytes"] for line in frame["ledger"]["lines"]) == 6 * GIB
        (reported,) = daemon.get("agents")[0]["pools"]
        assert (reported["live_bytes"], reported["held_bytes"]) == (None, 4 * GIB)
        labels = {"uuid": "GPU-0", "gpu": "0", "workload": "etl", "pid": str(os.getpid()), "allocator": "rmm"}
        assert daemon.value("gpumond_pool_held_bytes", **labels) == 4 * GIB
        assert daemon.value("gpumond_pool_live_bytes", **labels) is None
        assert daemon.value("gpumond_device_condition", uuid="GPU-0", gpu="0", condition="live_unknown") == 1
        detail = f"pid {os.getpid()} (etl): 4.0 GiB in rmm can't be split into live and free bytes"
        for command in ("status", "doctor"):
            output = daemon.run(command).stdout
            assert detail in output
            assert CONDITIONS["live_unknown"] in output
        assert daemon.run("top", "--once").returncode == 0
