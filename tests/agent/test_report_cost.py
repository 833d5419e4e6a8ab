"""Work that a report avoids, so that it costs its program little."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

from gpumond.agent.transport import Transport
from gpumond.facts.messages import Report, decode
from gpumond.facts.pools import PoolUsage, Reclaimable
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
