"""One connection's newest report."""

from __future__ import annotations

import socket

from gpumond.facts.messages import Report, encode
from gpumond.facts.program import OTHER
from gpumond.host.peer import Identity
from gpumond.programs.connection import AgentConnection, Budget, Limits
from gpumond.testing import make_pool
from gpumond.tick.claims import MAX_REPORTED_POOLS

POOLS = tuple(
    make_pool(f"GPU-{index % 2}", allocator=f"allocator-{index}", live=index, cached=1) for index in range(200)
)


def newest(report: Report) -> Report:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection = AgentConnection(ours, Identity(1, 2, 3), None, 3, Budget(Limits(), 0.0), 0.0)
        connection.unread = encode(report).strip()
        decoded = connection.newest()
        assert decoded is not None
        return decoded


def test_pools_beyond_the_limit_are_summed_for_each_device():
    pools = newest(Report("allow", (), POOLS)).pools
    assert pools[:MAX_REPORTED_POOLS] == POOLS[:MAX_REPORTED_POOLS]
    assert [(pool.allocator, pool.device_uuid) for pool in pools[MAX_REPORTED_POOLS:]] == [
        (OTHER, "GPU-0"),
        (OTHER, "GPU-1"),
    ]
    assert sum(pool.held_bytes for pool in pools) == sum(pool.held_bytes for pool in POOLS)


def test_pools_up_to_the_limit_are_unchanged():
    assert newest(Report("allow", (), POOLS[:MAX_REPORTED_POOLS])).pools == POOLS[:MAX_REPORTED_POOLS]
