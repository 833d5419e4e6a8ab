"""Work that a report avoids, so it costs its program little."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path

from hypothesis import given, strategies as st

from gpumond.agent.transport import Transport
from gpumond.facts.messages import Report, decode, encode, to_json
from gpumond.facts.pools import PoolUsage, Reclaimable
from tests.helpers.agent_daemon import FakeDaemon, environment, finished, host

BYTES = st.integers(0, 2**63 - 1)
OPTIONAL = st.none() | BYTES
TEXT = st.text(max_size=20).filter(str.isprintable)
EXACTNESS = st.sampled_from(["exact", "interval", "not_releasable"])
POOLS = st.builds(
    PoolUsage,
    allocator=TEXT,
    device_uuid=TEXT,
    live_bytes=OPTIONAL,
    held_bytes=BYTES,
    reclaimable=st.builds(Reclaimable, BYTES, BYTES, BYTES, EXACTNESS),
    stranded_bytes=BYTES,
    inside=st.none() | TEXT,
    peak_live_bytes=OPTIONAL,
    peak_held_bytes=OPTIONAL,
    ooms=OPTIONAL,
    retries=OPTIONAL,
    device_allocations=OPTIONAL,
    device_frees=OPTIONAL,
    refilled_flushes=BYTES,
    held_known=st.booleans(),
    spillable_bytes=OPTIONAL,
    unmapped_bytes=OPTIONAL,
    private_bytes=OPTIONAL,
    live_allocations=OPTIONAL,
    managed=st.booleans(),
)
POOL = PoolUsage(
    allocator="torch",
    device_uuid="GPU-a",
    live_bytes=6,
    held_bytes=20,
    reclaimable=Reclaimable(14, 14, 14),
    stranded_bytes=0,
)


@given(st.lists(POOLS, max_size=3))
def test_report_leaves_out_defaults_of_its_pools_and_may_contain_them(pools: list[PoolUsage]) -> None:
    report = Report(pools=tuple(pools))
    whole = {"v": 1, "type": "report", **json.loads(to_json(report))}
    assert decode(encode(report)) == decode(json.dumps(whole).encode()) == report


def test_pool_without_optional_counts_is_short() -> None:
    (pool,) = json.loads(encode(Report(pools=(POOL,))))["pools"]
    assert pool == {
        "allocator": "torch",
        "device_uuid": "GPU-a",
        "live_bytes": 6,
        "held_bytes": 20,
        "reclaimable": {"low": 14, "likely": 14, "high": 14},
        "stranded_bytes": 0,
    }


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
                link.enqueue(report)
                link.send_pending(0.0)
            heard = [decode(lines.readline().rstrip(b"\n")) for _ in reports]
            link.reset()
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
