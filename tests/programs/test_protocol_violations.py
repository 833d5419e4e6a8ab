"""Messages that violate the protocol, and fuzzed messages."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from pathlib import Path

import pytest

from gpumond.facts.messages import (
    MAX_MESSAGE_BYTES,
    AgentRequest,
    AgentResponse,
    FlushCommand,
    FlushResult,
    Goodbye,
    Hello,
    Report,
    encode,
)
from gpumond.facts.program import MAX_SCOPES, Program, ScopeUsage
from gpumond.programs.agent_connection import SocketLimits
from tests.helpers.agent_server import HELLO, REPORT, closed, eventually, in_event_loop, serving
from tests.helpers.fuzzing import mutated
from tests.helpers.values import make_pool


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (REPORT, "hello"),
        (HELLO + HELLO, "hello"),
        (encode(Hello("w" * 129)), "value"),
        (encode(Hello("train", rank=0)), "value"),
        (encode(Hello("train", rank=4, world_size=4)), "value"),
        (encode(Hello("train", rank=-1, world_size=4)), "value"),
        (encode(Hello("train", rank=1, world_size=1 << 40)), "value"),
        (encode(Hello("train", job="no spaces please")), "value"),
        (encode(Hello("train", job="j" * 129)), "value"),
        (encode(Hello("train", account="a b")), "value"),
        (HELLO + b'{"v":1,"type":"report","pools":[{}]}\n', "missing"),
        (HELLO + encode(FlushCommand("id", "torch", ())), "type"),
        (HELLO + encode(AgentRequest("id", "snapshot")), "type"),
        (HELLO + encode(Report(program=Program(scopes=(ScopeUsage(name="no spaces", entries=1),)))), "value"),
        (HELLO + encode(Report(program=Program(scopes=(ScopeUsage(name="x" * 129, entries=1),)))), "value"),
        (
            HELLO + encode(Report(program=Program(scopes=(ScopeUsage(name="x", entries=1),) * (MAX_SCOPES + 2)))),
            "value",
        ),
        (HELLO + b"x" * (MAX_MESSAGE_BYTES + 1), "oversize"),
        (b"GET / HTTP/1.1\r\n", "json"),
    ],
)
@in_event_loop
async def test_protocol_violation_closes_the_connection_and_is_counted(tmp_path: Path, sent: bytes, reason: str):
    async with serving(tmp_path) as harness:
        with harness.connect() as connection:
            try:
                connection.sendall(sent)
            except BrokenPipeError:
                pass
            await closed(connection)
        assert harness.rejected == {reason: 1}


@in_event_loop
async def test_fuzzed_messages_do_not_affect_a_valid_agent(tmp_path: Path):
    """A hundred thousand messages on many connections, while a valid agent reports."""
    rng = random.Random(7)
    seeds = [
        HELLO,
        REPORT,
        encode(Report(program=Program(scopes=(ScopeUsage(name="epoch", entries=1),)))),
        encode(FlushResult("one", "freed")),
        encode(AgentResponse("one")),
        encode(Goodbye()),
        b'{"v":1,"type":"report","pools":[[]]}\n',
    ]
    loop = asyncio.get_running_loop()
    limits = SocketLimits(messages_per_second=10**7, bytes_per_second=10**10)
    async with serving(tmp_path, limits) as harness:
        with harness.connect() as valid:
            valid.sendall(HELLO + REPORT)
            await harness.reports()
            sent = 0
            while sent < 100_000:
                with harness.connect() as connection:
                    connection.setblocking(False)
                    batch = HELLO * rng.randint(0, 1) + b"".join(mutated(rng, rng.choice(seeds)) for _ in range(50))
                    sent += batch.count(b"\n")
                    try:
                        await loop.sock_sendall(connection, batch)
                    except OSError:
                        pass
                    await asyncio.sleep(0)
                if not rng.randrange(100):
                    valid.sendall(encode(Report(pools=(make_pool(live=sent),))))
                    await eventually(partial(harness.has_report, sent))
        await harness.reports(0)
        assert sum(harness.rejected.values()) > 1000
