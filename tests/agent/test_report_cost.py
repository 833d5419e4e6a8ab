"""Work that a report avoids, so that it costs its program little."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

from gpumond.agent.transport import Transport
from gpumond.facts.messages import Report, decode
from gpumond.facts.pools import PoolUsage, Reclaimable
from tests.agent.driver import run
from tests.helpers.agent_daemon import FakeDaemon, environment, finished, host

POOL = PoolUsage(
    allocator="torch",
    device_uuid="GPU-a",
    live_bytes=6,
    held_bytes=20,
    reclaimable=Reclaimable(14, 14, 14),
    stranded_bytes=0,
)


def test_report_is_sent_with_its_changes(tmp_path: Path) -> None:
    reports = [Report(pools=(pool,)) for pool in (POOL, replace(POOL), replace(POOL, live_bytes=7), POOL)]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "agent.sock"))
        listener.listen(1)
        link = Transport()
        assert link.connect(str(tmp_path / "agent.sock"), 0.0)
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as lines:
            for report in reports:
                link.send(report)
                link.push(0.0)
            heard = [decode(lines.readline().rstrip(b"\n")) for _ in reports]
            link.renew()
    assert heard == reports


def test_program_without_scopes_loads_no_module_for_them(daemon: FakeDaemon) -> None:
    code = """
import sys, gpumond.agent
gpumond.agent.start()
sys.stdin.read()
print([name for name in sys.modules if "scopes" in name])
"""
    with host(code, environment(daemon.path)) as process:
        daemon.wait_message(Report)
        assert finished(process) == "[]\n"


def test_missing_driver_is_not_searched_for_at_each_report(library: Path) -> None:
    """No object is left for the program's garbage collector, which may have to visit millions."""
    code = """
import gc, sys, torch
from gpumond.agent.loaded_allocators import LOADED
LOADED.read()
looked = []
sys.addaudithook(lambda event, arguments: looked.append(event) if event == "ctypes.dlopen" else None)
gc.collect()
gc.disable()
for _ in range(20):
    LOADED.read()
print(looked, gc.collect())
"""
    assert run(code, library, "c") == ["[] 0"]


def test_driver_is_searched_for_at_the_first_capture(library: Path) -> None:
    code = """
import ctypes
from gpumond.agent.allocators import cuda
class Graph:
    def capture_begin(self): pass
    def capture_end(self): pass
cuda.watch_captures(Graph)
with cuda.capture_safe():
    pass
driver = ctypes.CDLL("libcuda.so.1")
graph = Graph()
graph.capture_begin()
with cuda.capture_safe():
    cuda.pool_bytes(cuda.default_pool(0))
print(driver.fake_spoiled())
"""
    assert run(code, library, "c") == ["0"]
