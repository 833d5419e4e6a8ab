"""Reports of agents on a real socket: identity, order, and the end of a connection."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from gpumond.facts.messages import Goodbye, Report, encode
from gpumond.facts.program import OTHER, Oom, Program
from gpumond.facts.snapshot import ProcessEnd
from gpumond.host.peer import PeerIdentity
from gpumond.programs.agent_connection import AgentConnection, ReadBudget, SocketLimits
from gpumond.programs.agent_server import AgentServer
from gpumond.tick.claims import MAX_REPORTED_POOLS
from tests.helpers.agent_server import HELLO, MALFORMED_REPORT, OWN, REPORT, closed, eventually, in_event_loop, serving
from tests.helpers.values import make_pool


@in_event_loop
async def test_report_has_its_identity_from_the_kernel_and_its_pools_from_the_agent(tmp_path: Path):
    async with serving(tmp_path) as harness:
        with harness.connect() as agent:
            agent.sendall(HELLO[:-1].replace(b"{", b'{"pid":1,"uid":0,', 1) + b"\n" + REPORT)
            (report,) = await harness.reports()
            assert (report.pid, report.start_ticks, report.uid) == (OWN.pid, OWN.start_ticks, OWN.uid)
            assert (report.workload, report.pools) == ("train", (make_pool(live=7),))
        await harness.reports(0)


@in_event_loop
async def test_messages_may_arrive_in_pieces_and_the_newest_report_counts(tmp_path: Path):
    async with serving(tmp_path) as harness:
        with harness.connect() as agent:
            for byte in HELLO + REPORT + encode(Report(pools=(make_pool(live=8),))):
                agent.send(bytes([byte]))
                await asyncio.sleep(0)
                harness.server.receive()  # because unread small pieces would fill the socket
            await eventually(lambda: [r.pools[0].live_bytes for r in harness.server.reports()] == [8])


@in_event_loop
async def test_report_that_has_arrived_is_read_when_reports_are_asked_for(tmp_path: Path):
    async with serving(tmp_path) as harness:
        with harness.connect() as agent:
            agent.sendall(HELLO + REPORT)
            await harness.reports()
            for live in (8, 9):
                agent.sendall(encode(Report(pools=(make_pool(live=live),))))
                assert harness.has_report(live)


@in_event_loop
async def test_report_of_one_process_is_read_without_decoding_those_of_others(tmp_path: Path):
    async with serving(tmp_path) as harness:
        with harness.connect() as agent:
            agent.sendall(HELLO + REPORT)
            await harness.reports()
            agent.sendall(REPORT.replace(b'"pools":[', b'"pools":7,"other":['))
            await eventually(lambda: all(peer.undecoded_report for peer in harness.server._peers.values()))
            assert harness.server.report(PeerIdentity(OWN.pid + 1, OWN.start_ticks, OWN.uid)) is None
            assert not harness.rejected
            assert harness.server.report(OWN) is None
            assert harness.rejected.total() == 1


@in_event_loop
async def test_forked_child_on_the_connection_of_its_parent_is_rejected(tmp_path: Path):
    async with serving(tmp_path) as harness:
        with harness.connect() as agent:
            agent.sendall(HELLO + REPORT)
            await harness.reports()
            child = os.fork()
            if child == 0:
                agent.send(REPORT)
                os._exit(0)
            os.waitpid(child, 0)
            await eventually(lambda: harness.rejected["foreign_sender"] == 1)
            assert harness.server.reports() == ()


@in_event_loop
async def test_agent_that_says_bye_has_no_report_any_more(tmp_path: Path):
    async with serving(tmp_path) as harness:
        with harness.connect() as agent:
            agent.sendall(HELLO + REPORT)
            await harness.reports()
            agent.sendall(encode(Goodbye()))
            await harness.reports(0)


@in_event_loop
async def test_newest_report_alone_is_decoded(tmp_path: Path):
    async with serving(tmp_path) as harness:
        with harness.connect() as agent:
            agent.sendall(HELLO + REPORT)
            await harness.reports()
            agent.sendall(MALFORMED_REPORT + encode(Report(pools=(make_pool(live=8),))))
            await eventually(lambda: [r.pools[0].live_bytes for r in harness.server.reports()] == [8])
            agent.sendall(MALFORMED_REPORT)
            await eventually(lambda: harness.server.reports() == ())
            await closed(agent)
        assert harness.rejected == {"missing": 1}
        assert harness.reported == 4


@in_event_loop
async def test_newest_report_counts_in_any_order_of_its_keys(tmp_path: Path):
    eight = encode(Report(pools=(make_pool(live=8),)))
    other = json.dumps({**json.loads(REPORT), "v": 1}, sort_keys=True).encode() + b"\n"
    assert not other.startswith(REPORT[:10])
    async with serving(tmp_path) as harness:
        with harness.connect() as agent:
            agent.sendall(HELLO + REPORT)
            for message, live in ((eight, 8), (other, 7), (eight, 8)):
                agent.sendall(message)
                await eventually(lambda live=live: harness.has_report(live))


@pytest.mark.parametrize("last", [MALFORMED_REPORT, b'{"v":1,"type":"report","type":"hello"}\n'])
@in_event_loop
async def test_last_report_is_decoded_when_the_connection_closes(tmp_path: Path, last: bytes):
    async with serving(tmp_path) as harness:
        with harness.connect() as agent:
            agent.sendall(HELLO + REPORT)
            await harness.reports()
            agent.sendall(last)
        await eventually(lambda: harness.rejected.total() == 1)
        assert harness.server.reports() == ()


@in_event_loop
async def test_stale_report_is_not_returned(tmp_path: Path):
    async with serving(tmp_path, SocketLimits(stale_seconds=0.2)) as harness:
        with harness.connect() as agent:
            agent.sendall(HELLO + REPORT)
            await harness.reports()
            await harness.reports(0)


@pytest.mark.parametrize(
    ("last", "returned", "expected"),
    [
        (
            encode(Goodbye("out-of-memory")),
            AgentServer.take_ends,
            (ProcessEnd(OWN.pid, OWN.start_ticks, "out-of-memory"),),
        ),
        (
            encode(Report(program=Program(ooms=(Oom(number=1, at=2.0, seen="scope"),)))) + encode(Goodbye()),
            lambda server: tuple(
                (each.pid, each.workload, each.program.ooms[0].number) for each in server.take_exited_reports()
            ),
            ((OWN.pid, "train", 1),),
        ),
    ],
    ids=["ending", "out-of-memory error"],
)
@in_event_loop
async def test_last_message_of_an_agent_is_returned_once(
    tmp_path: Path, last: bytes, returned: Callable[[AgentServer], object], expected: object
):
    async with serving(tmp_path) as harness:
        with harness.connect() as agent, harness.connect() as other:
            agent.sendall(HELLO + REPORT)
            other.sendall(HELLO + REPORT)
            await harness.reports()
            agent.sendall(last)
            other.sendall(encode(Goodbye()))
        await harness.reports(0)
        assert returned(harness.server) == expected
        assert returned(harness.server) == ()


POOLS = tuple(
    make_pool(f"GPU-{index % 2}", allocator=f"allocator-{index}", live=index, cached=1) for index in range(200)
)


def newest(report: Report) -> Report:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection = AgentConnection(ours, PeerIdentity(1, 2, 3), None, 3, ReadBudget(SocketLimits(), 0.0), 0.0)
        connection.undecoded_report = encode(report).strip()
        decoded = connection.newest_report()
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
