"""Limits of connections, messages and time on the agents' socket."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from gpumond.facts.messages import Report, encode
from gpumond.programs.agent_connection import SocketLimits
from tests.helpers.agent_server import HELLO, REPORT, ServerOnSocket, closed, eventually, in_event_loop, serving
from tests.helpers.values import make_pool


@in_event_loop
async def test_connections_of_one_uid_are_limited(tmp_path: Path):
    async with serving(tmp_path, SocketLimits(connections_per_uid=3)) as harness:
        agents = [harness.connect() for _ in range(4)]
        for agent in agents[:3]:
            agent.sendall(HELLO)
        await closed(agents[3])
        assert harness.rejected == {"crowd": 1}
        for agent in agents:
            agent.close()


@in_event_loop
async def test_connections_without_a_hello_are_limited_by_uid_and_excess_ones_closed_at_once(tmp_path: Path):
    async with serving(tmp_path, SocketLimits(pending_per_uid=4, hello_seconds=60, shared_hello_seconds=60)) as harness:
        silent = [harness.connect() for _ in range(4)]
        beyond = [harness.connect() for _ in range(100)]
        for connection in beyond:
            await closed(connection)
        assert harness.rejected == {"crowd": 100}
        silent[0].sendall(HELLO + REPORT)
        await harness.reports()
        with harness.connect() as agent:
            agent.sendall(HELLO + REPORT)
            await eventually(lambda: harness.server.reports() and harness.reported == 2)
        for connection in silent + beyond:
            connection.close()


@in_event_loop
async def test_server_that_accepts_no_more_connections_can_be_closed(tmp_path: Path):
    limits = SocketLimits(pending=2, hello_seconds=60, shared_hello_seconds=60)
    async with serving(tmp_path, limits) as harness:
        silent = [harness.connect() for _ in range(4)]
        await asyncio.sleep(0.1)  # two are accepted; the others wait in the queue
        harness.server.close()
        for connection in silent:
            await closed(connection)
            connection.close()
        with socket.socket(socket.AF_UNIX) as late, pytest.raises(ConnectionRefusedError):
            late.connect(str(harness.path))


@in_event_loop
async def test_agents_whose_hello_is_queued_are_all_accepted(tmp_path: Path):
    harness = ServerOnSocket(tmp_path / "agent.sock", SocketLimits(pending_per_uid=4))
    agents = [harness.connect() for _ in range(60)]
    for agent in agents:
        agent.sendall(HELLO + REPORT)
    harness.server.serve()
    await eventually(lambda: harness.server.reports() and harness.reported == 60)
    assert harness.rejected == {}
    harness.server.close()
    for agent in agents:
        agent.close()


@in_event_loop
async def test_hello_timeout_is_shorter_for_a_uid_with_several_connections_without_a_hello(tmp_path: Path):
    async with serving(tmp_path, SocketLimits(hello_seconds=60, shared_hello_seconds=0.1)) as harness:
        with harness.connect() as first, harness.connect() as second:
            await eventually(lambda: harness.rejected["hello_timeout"] == 1)
            first.setblocking(False)
            second.setblocking(False)
            remaining = [each for each in (first, second) if _is_open(each)]
            assert len(remaining) == 1
            remaining[0].sendall(HELLO + REPORT)
            await harness.reports()


def _is_open(connection: socket.socket) -> bool:
    try:
        connection.recv(1)
    except BlockingIOError:
        return True
    return False


@in_event_loop
async def test_silent_and_incomplete_connections_are_closed_after_their_timeouts(tmp_path: Path):
    async with serving(tmp_path, SocketLimits(hello_seconds=0.1, message_seconds=0.1)) as harness:
        with harness.connect() as silent, harness.connect() as slow:
            slow.sendall(HELLO + REPORT[:10])
            await closed(silent)
            await closed(slow)
        assert harness.rejected == {"hello_timeout": 1, "frame_timeout": 1}


@in_event_loop
async def test_silent_connections_delay_others_only_until_their_timeout(tmp_path: Path):
    async with serving(tmp_path, SocketLimits(pending=2, hello_seconds=0.1)) as harness:
        silent = [harness.connect() for _ in range(2)]
        with harness.connect() as agent:
            agent.sendall(HELLO + REPORT)
            await harness.reports()
        for connection in silent:
            connection.close()


@in_event_loop
async def test_flood_of_reports_is_read_more_slowly_and_without_loss(tmp_path: Path):
    async with serving(tmp_path, SocketLimits(messages_per_second=200)) as harness:
        with harness.connect() as agent:
            last = encode(Report(pools=(make_pool(live=9),)))
            agent.setblocking(False)
            await asyncio.get_running_loop().sock_sendall(agent, HELLO + REPORT * 500 + last)
            await eventually(lambda: [r.pools[0].live_bytes for r in harness.server.reports()] == [9])
        assert harness.reported == 501
        assert harness.rejected["rate"] > 0
