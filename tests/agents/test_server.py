"""The agents' socket, met by real sockets: honest agents, strangers and vandals."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from gpumond.agents.server import AgentServer, Limits
from gpumond.host.peer_credentials import Identity, start_ticks
from gpumond.host.runtime_directory import bind_agent_socket
from gpumond.model.program import SCOPES, Dump, Oom, Program, ScopeUsage
from gpumond.model.snapshot import AgentReport, ProgramEnd
from gpumond.protocol.messages import (
    MAX_MESSAGE_BYTES,
    AgentRequest,
    AgentResponse,
    Bye,
    Cancel,
    FlushCommand,
    FlushResult,
    Hello,
    Report,
    decode,
    encode,
)
from gpumond.testing import make_pool
from tests.fuzzing import mutated

HELLO = encode(Hello("train"))
REPORT = encode(Report(pools=(make_pool(live=7),)))
TOLD = encode(Report(program=Program(scopes=(ScopeUsage(name="epoch", entries=1),))))
ME = Identity(os.getpid(), start_ticks(os.getpid()) or 0, os.getuid())


class Door:
    """An intake under test, with what it refused."""

    def __init__(self, path: Path, limits: Limits) -> None:
        self.path = path
        self.refused: Counter[str] = Counter()
        listener = bind_agent_socket(path, 0o600)
        self.reported = 0
        self.intake = AgentServer(
            listener, limits=limits, reported=self.count, rejected=lambda reason: self.refused.update([reason])
        )

    def count(self, reports: int) -> None:
        self.reported += reports

    def connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(self.path))
        return connection

    async def reports(self, count: int = 1) -> tuple[AgentReport, ...]:
        await eventually(lambda: len(self.intake.reports()) == count)
        return self.intake.reports()


async def eventually(condition: Callable[[], object]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition did not come true in time")


@asynccontextmanager
async def door(directory: Path, limits: Limits = Limits()) -> AsyncIterator[Door]:
    opened = Door(directory / "agent.sock", limits)
    opened.intake.serve()
    try:
        yield opened
    finally:
        opened.intake.close()


def in_a_loop(test: Callable[[Path], Awaitable[None]]) -> Callable[[Path], None]:
    def run(tmp_path: Path) -> None:
        asyncio.run(test(tmp_path))  # type: ignore[arg-type]

    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    return run


async def closed(connection: socket.socket) -> None:
    """Waits until the other end has closed the connection."""
    connection.setblocking(False)

    def at_end() -> bool:
        try:
            return connection.recv(4096) == b""
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True

    await eventually(at_end)


@in_a_loop
async def test_a_report_is_the_kernels_word_on_who_and_the_agents_on_what(tmp_path: Path):
    async with door(tmp_path) as at:
        with at.connect() as agent:
            agent.sendall(HELLO[:-1].replace(b"{", b'{"pid":1,"uid":0,', 1) + b"\n" + REPORT)
            (report,) = await at.reports()
            assert (report.pid, report.start_ticks, report.uid) == (ME.pid, ME.start_ticks, ME.uid)
            assert (report.workload, report.pools) == ("train", (make_pool(live=7),))
        await at.reports(0)


@in_a_loop
async def test_frames_may_come_in_pieces_and_the_newest_report_wins(tmp_path: Path):
    async with door(tmp_path) as at:
        with at.connect() as agent:
            for byte in HELLO + REPORT + encode(Report(pools=(make_pool(live=8),))):
                agent.send(bytes([byte]))
                await asyncio.sleep(0)  # unread, so many small pieces would fill the socket
            await eventually(lambda: [r.pools[0].live_bytes for r in at.intake.reports()] == [8])


@in_a_loop
async def test_the_report_of_one_process_is_read_without_decoding_those_of_others(tmp_path: Path):
    async with door(tmp_path) as at:
        with at.connect() as agent:
            agent.sendall(HELLO + REPORT)
            await at.reports()
            agent.sendall(REPORT.replace(b'"pools":[', b'"pools":7,"other":['))
            await eventually(lambda: all(peer.unread for peer in at.intake._peers.values()))
            assert at.intake.report(Identity(ME.pid + 1, ME.start_ticks, ME.uid)) is None
            assert not at.refused
            assert at.intake.report(ME) is None
            assert at.refused.total() == 1


@in_a_loop
async def test_a_forked_child_on_its_parents_connection_is_refused(tmp_path: Path):
    async with door(tmp_path) as at:
        with at.connect() as agent:
            agent.sendall(HELLO + REPORT)
            await at.reports()
            child = os.fork()
            if child == 0:
                agent.send(REPORT)
                os._exit(0)
            os.waitpid(child, 0)
            await eventually(lambda: at.refused["foreign_sender"] == 1)
            assert at.intake.reports() == ()


@in_a_loop
async def test_an_agent_that_leaves_is_gone_at_once(tmp_path: Path):
    async with door(tmp_path) as at:
        with at.connect() as agent:
            agent.sendall(HELLO + REPORT)
            await at.reports()
            agent.sendall(encode(Bye()))
            await at.reports(0)


NONSENSE = b'{"v":1,"type":"report","pools":[{}]}\n'


@in_a_loop
async def test_of_later_reports_the_newest_alone_is_looked_at(tmp_path: Path):
    async with door(tmp_path) as at:
        with at.connect() as agent:
            agent.sendall(HELLO + REPORT)
            await at.reports()
            agent.sendall(NONSENSE + encode(Report(pools=(make_pool(live=8),))))
            await eventually(lambda: [r.pools[0].live_bytes for r in at.intake.reports()] == [8])
            agent.sendall(NONSENSE)
            await eventually(lambda: at.intake.reports() == ())
            await closed(agent)
        assert at.refused == {"missing": 1}
        assert at.reported == 4


@in_a_loop
async def test_the_newest_report_holds_in_whatever_order_its_keys_come(tmp_path: Path):
    eight = encode(Report(pools=(make_pool(live=8),)))
    other = json.dumps({**json.loads(REPORT), "v": 1}, sort_keys=True).encode() + b"\n"
    assert not other.startswith(REPORT[:10])
    async with door(tmp_path) as at:
        with at.connect() as agent:
            agent.sendall(HELLO + REPORT)
            for frame, live in ((eight, 8), (other, 7), (eight, 8)):
                agent.sendall(frame)
                await eventually(lambda live=live: heard(at, live))


@pytest.mark.parametrize("last", [NONSENSE, b'{"v":1,"type":"report","type":"hello"}\n'])
def test_last_words_are_looked_at_though_nobody_asked(tmp_path: Path, last: bytes):
    async def run() -> None:
        async with door(tmp_path) as at:
            with at.connect() as agent:
                agent.sendall(HELLO + REPORT)
                await at.reports()
                agent.sendall(last)
            await eventually(lambda: at.refused.total() == 1)
            assert at.intake.reports() == ()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (REPORT, "hello"),
        (HELLO + HELLO, "hello"),
        (encode(Hello("no spaces please")), "value"),
        (HELLO + b'{"v":1,"type":"report","pools":[{}]}\n', "missing"),
        (HELLO + encode(FlushCommand("id", "torch", ())), "type"),
        (HELLO + encode(AgentRequest("id", "snapshot")), "type"),
        (HELLO + encode(Report(program=Program(scopes=(ScopeUsage(name="no spaces", entries=1),)))), "value"),
        (HELLO + encode(Report(program=Program(scopes=(ScopeUsage(name="x" * 129, entries=1),)))), "value"),
        (HELLO + encode(Report(program=Program(scopes=(ScopeUsage(name="x", entries=1),) * (SCOPES + 2)))), "value"),
        (HELLO + b"x" * (MAX_MESSAGE_BYTES + 1), "oversize"),
        (b"GET / HTTP/1.1\r\n", "json"),
    ],
)
def test_who_breaks_the_protocol_is_closed_and_counted(tmp_path: Path, sent: bytes, reason: str):
    async def run() -> None:
        async with door(tmp_path) as at:
            with at.connect() as vandal:
                try:
                    vandal.sendall(sent)
                except BrokenPipeError:
                    pass
                await closed(vandal)
            assert at.refused == {reason: 1}

    asyncio.run(run())


@in_a_loop
async def test_who_says_nothing_or_half_a_frame_is_not_waited_for(tmp_path: Path):
    async with door(tmp_path, Limits(hello_seconds=0.1, frame_seconds=0.1)) as at:
        with at.connect() as silent, at.connect() as slow:
            slow.sendall(HELLO + REPORT[:10])
            await closed(silent)
            await closed(slow)
        assert at.refused == {"hello_timeout": 1, "frame_timeout": 1}


@in_a_loop
async def test_one_uid_gets_so_many_connections_and_no_more(tmp_path: Path):
    async with door(tmp_path, Limits(peers_per_uid=3)) as at:
        agents = [at.connect() for _ in range(4)]
        for agent in agents[:3]:
            agent.sendall(HELLO)
        await closed(agents[3])
        assert at.refused == {"crowd": 1}
        for agent in agents:
            agent.close()


@in_a_loop
async def test_connections_without_a_hello_are_bounded_by_uid_and_the_rest_is_closed_at_once(tmp_path: Path):
    async with door(tmp_path, Limits(pending_per_uid=4, hello_seconds=60, shared_hello_seconds=60)) as at:
        silent = [at.connect() for _ in range(4)]
        beyond = [at.connect() for _ in range(100)]
        for connection in beyond:
            await closed(connection)
        assert at.refused == {"crowd": 100}
        silent[0].sendall(HELLO + REPORT)
        await at.reports()
        with at.connect() as agent:
            agent.sendall(HELLO + REPORT)
            await eventually(lambda: at.intake.reports() and at.reported == 2)
        for connection in silent + beyond:
            connection.close()


@in_a_loop
async def test_agents_whose_hello_waits_in_the_queue_are_all_let_in(tmp_path: Path):
    opened = Door(tmp_path / "agent.sock", Limits(pending_per_uid=4))
    agents = [opened.connect() for _ in range(60)]
    for agent in agents:
        agent.sendall(HELLO + REPORT)
    opened.intake.serve()
    await eventually(lambda: opened.intake.reports() and opened.reported == 60)
    assert opened.refused == {}
    opened.intake.close()
    for agent in agents:
        agent.close()


@in_a_loop
async def test_a_uid_with_several_connections_without_a_hello_has_less_time_for_each(tmp_path: Path):
    async with door(tmp_path, Limits(hello_seconds=60, shared_hello_seconds=0.1)) as at:
        with at.connect() as first, at.connect() as second:
            await eventually(lambda: at.refused["hello_timeout"] == 1)
            first.setblocking(False)
            second.setblocking(False)
            open_still = [each for each in (first, second) if _waits(each)]
            assert len(open_still) == 1
            open_still[0].sendall(HELLO + REPORT)
            await at.reports()


def _waits(connection: socket.socket) -> bool:
    try:
        connection.recv(1)
    except BlockingIOError:
        return True
    return False


@in_a_loop
async def test_silent_connections_do_not_keep_others_out_for_long(tmp_path: Path):
    async with door(tmp_path, Limits(pending=2, hello_seconds=0.1)) as at:
        strangers = [at.connect() for _ in range(2)]
        with at.connect() as agent:
            agent.sendall(HELLO + REPORT)
            await at.reports()
        for stranger in strangers:
            stranger.close()


@in_a_loop
async def test_a_flood_is_read_more_slowly_and_loses_nothing(tmp_path: Path):
    async with door(tmp_path, Limits(frames_per_second=200)) as at:
        with at.connect() as agent:
            last = encode(Report(pools=(make_pool(live=9),)))
            agent.setblocking(False)
            await asyncio.get_running_loop().sock_sendall(agent, HELLO + REPORT * 500 + last)
            await eventually(lambda: [r.pools[0].live_bytes for r in at.intake.reports()] == [9])
        assert at.refused["rate"] > 0


@in_a_loop
async def test_an_old_report_is_no_knowledge(tmp_path: Path):
    async with door(tmp_path, Limits(stale_seconds=0.2)) as at:
        with at.connect() as agent:
            agent.sendall(HELLO + REPORT)
            await at.reports()
            await at.reports(0)


@in_a_loop
async def test_a_flush_is_answered_by_its_result(tmp_path: Path):
    async with door(tmp_path) as at:
        with at.connect() as agent:
            agent.sendall(HELLO + REPORT)
            await at.reports()
            asked = asyncio.create_task(at.intake.flush(ME, FlushCommand("one", "torch", ("cache",))))
            await asyncio.sleep(0)
            agent.settimeout(5)
            received = agent.recv(4096)
            assert decode(received) == FlushCommand("one", "torch", ("cache",))
            agent.sendall(encode(FlushResult("another", "freed")) + encode(FlushResult("one", "nothing")))
            assert await asked == FlushResult("one", "nothing")


@in_a_loop
async def test_a_flush_that_is_not_answered_is_called_off(tmp_path: Path):
    async with door(tmp_path, Limits(answer_seconds=0)) as at:
        with at.connect() as agent:
            agent.sendall(HELLO + REPORT)
            await at.reports()
            assert await at.intake.flush(ME, FlushCommand("one", "torch", (), timeout_seconds=0.05)) is None
            frames = agent.recv(4096).splitlines()
            assert decode(frames[1]) == Cancel("one")
        await at.reports(0)
        assert await at.intake.flush(ME, FlushCommand("two", "torch", ())) is None


@in_a_loop
async def test_a_flush_that_was_called_off_may_be_under_way_until_it_is_answered_or_the_agent_is_gone(tmp_path: Path):
    async with door(tmp_path, Limits(answer_seconds=0)) as at:
        with at.connect() as agent:
            agent.sendall(HELLO + REPORT)
            await at.reports()
            assert not at.intake.flushing(ME)
            for name in ("one", "two"):
                assert await at.intake.flush(ME, FlushCommand(name, "torch", (), timeout_seconds=0.02)) is None
            agent.sendall(encode(FlushResult("another", "freed")) + encode(FlushResult("two", "deferred")) + REPORT)
            await asyncio.sleep(0.05)
            assert at.intake.flushing(ME)
            agent.sendall(encode(FlushResult("one", "freed")))
            await eventually(lambda: not at.intake.flushing(ME))
            assert await at.intake.flush(ME, FlushCommand("three", "torch", (), timeout_seconds=0.02)) is None
            assert at.intake.flushing(ME)
        await eventually(lambda: not at.intake.flushing(ME))


@in_a_loop
async def test_how_a_program_ended_is_heard_once(tmp_path: Path):
    async with door(tmp_path) as at:
        with at.connect() as agent, at.connect() as other:
            agent.sendall(HELLO + REPORT)
            other.sendall(HELLO + REPORT)
            await at.reports()
            agent.sendall(encode(Bye("out-of-memory")))
            other.sendall(encode(Bye()))
        await at.reports(0)
        assert at.intake.ends() == (ProgramEnd(ME.pid, ME.start_ticks, "out-of-memory"),)
        assert at.intake.ends() == ()


@in_a_loop
async def test_the_last_words_of_one_that_ran_out_of_memory_are_heard_once(tmp_path: Path):
    async with door(tmp_path) as at:
        with at.connect() as agent, at.connect() as other:
            agent.sendall(HELLO + REPORT)
            other.sendall(HELLO + REPORT)
            await at.reports()
            last = encode(Report(program=Program(ooms=(Oom(number=1, at=2.0, seen="scope"),))))
            agent.sendall(last + encode(Bye()))
            other.sendall(encode(Bye()))
        await at.reports(0)
        (departed,) = at.intake.departed()
        assert (departed.pid, departed.workload, departed.program.ooms[0].number) == (ME.pid, "train", 1)
        assert at.intake.departed() == ()


@in_a_loop
async def test_an_agent_is_asked_only_what_it_answers(tmp_path: Path):
    """An older one would take the unknown frame for nonsense and leave."""
    async with door(tmp_path) as at:
        with at.connect() as agent:
            agent.sendall(encode(Hello("train", answers=("snapshot",))) + REPORT)
            await at.reports()
            refused = await at.intake.ask(ME, AgentRequest("one", "limit", 5))
            assert refused is not None
            assert "allow_limit=True" in refused.reason
            asked = asyncio.create_task(at.intake.ask(ME, AgentRequest("two", "snapshot")))
            await asyncio.sleep(0)
            agent.settimeout(5)
            assert decode(agent.recv(4096)) == AgentRequest("two", "snapshot")
            assert not at.intake.flushing(ME)
            answer = AgentResponse("two", dump=Dump("torch", "/tmp/x", 5))
            agent.sendall(encode(AgentResponse("another")) + encode(answer))
            assert await asked == answer
            left = asyncio.create_task(at.intake.ask(ME, AgentRequest("three", "snapshot")))
            await asyncio.sleep(0)
            assert await at.intake.ask(ME, AgentRequest("four", "snapshot"), seconds=0.01) is None
        assert await left is None


@in_a_loop
async def test_a_hundred_thousand_fuzzed_frames_hurt_nobody(tmp_path: Path):
    """Mutated frames over many connections, while an honest agent is heard all along."""
    dice = random.Random(7)
    seeds = [
        HELLO,
        REPORT,
        TOLD,
        encode(FlushResult("one", "freed")),
        encode(AgentResponse("one")),
        encode(Bye()),
        b'{"v":1,"type":"report","pools":[[]]}\n',
    ]
    loop = asyncio.get_running_loop()
    limits = Limits(frames_per_second=10**7, bytes_per_second=10**10)
    async with door(tmp_path, limits) as at:
        with at.connect() as honest:
            honest.sendall(HELLO + REPORT)
            await at.reports()
            sent = 0
            while sent < 100_000:
                with at.connect() as vandal:
                    vandal.setblocking(False)
                    volley = HELLO * dice.randint(0, 1) + b"".join(mutated(dice, dice.choice(seeds)) for _ in range(50))
                    sent += volley.count(b"\n")
                    try:
                        await loop.sock_sendall(vandal, volley)
                    except OSError:
                        pass
                    await asyncio.sleep(0)
                if not dice.randrange(100):
                    honest.sendall(encode(Report(pools=(make_pool(live=sent),))))
                    await eventually(partial(heard, at, sent))
        await at.reports(0)
        assert sum(at.refused.values()) > 1000


def heard(at: Door, live: int) -> bool:
    return any(pool.live_bytes == live for report in at.intake.reports() for pool in report.pools)
