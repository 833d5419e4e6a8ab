"""Flush commands and requests to agents, and their results."""

from __future__ import annotations

import asyncio
from pathlib import Path

from gpumond.facts.messages import (
    AgentRequest,
    AgentResponse,
    CancelFlush,
    FlushCommand,
    FlushResult,
    Hello,
    decode,
    encode,
)
from gpumond.facts.program import Dump
from gpumond.programs.agent_connection import SocketLimits
from tests.helpers.agent_server import HELLO, OWN, REPORT, eventually, in_event_loop, serving


@in_event_loop
async def test_flush_returns_the_result_with_its_id(tmp_path: Path):
    async with serving(tmp_path) as harness:
        with harness.connect() as agent:
            agent.sendall(HELLO + REPORT)
            await harness.reports()
            pending = asyncio.create_task(harness.server.flush(OWN, FlushCommand("one", "torch", ("cache",))))
            await asyncio.sleep(0)
            agent.settimeout(60)
            received = agent.recv(4096)
            assert decode(received) == FlushCommand("one", "torch", ("cache",))
            agent.sendall(encode(FlushResult("another", "freed")) + encode(FlushResult("one", "nothing")))
            assert await pending == FlushResult("one", "nothing")


@in_event_loop
async def test_flush_without_a_result_is_cancelled(tmp_path: Path):
    async with serving(tmp_path, SocketLimits(answer_seconds=0)) as harness:
        with harness.connect() as agent:
            agent.sendall(HELLO + REPORT)
            await harness.reports()
            assert await harness.server.flush(OWN, FlushCommand("one", "torch", (), timeout_seconds=0.05)) is None
            messages = agent.recv(4096).splitlines()
            assert decode(messages[1]) == CancelFlush("one")
        await harness.reports(0)
        assert await harness.server.flush(OWN, FlushCommand("two", "torch", ())) is None


@in_event_loop
async def test_cancelled_flush_is_in_progress_until_its_result_or_the_end_of_the_agent(tmp_path: Path):
    async with serving(tmp_path, SocketLimits(answer_seconds=0)) as harness:
        with harness.connect() as agent:
            agent.sendall(HELLO + REPORT)
            await harness.reports()
            assert not harness.server.is_flushing(OWN)
            for name in ("one", "two"):
                assert await harness.server.flush(OWN, FlushCommand(name, "torch", (), timeout_seconds=0.02)) is None
            agent.sendall(encode(FlushResult("another", "freed")) + encode(FlushResult("two", "deferred")) + REPORT)
            await asyncio.sleep(0.05)
            assert harness.server.is_flushing(OWN)
            agent.sendall(encode(FlushResult("one", "freed")))
            await eventually(lambda: not harness.server.is_flushing(OWN))
            assert await harness.server.flush(OWN, FlushCommand("three", "torch", (), timeout_seconds=0.02)) is None
            assert harness.server.is_flushing(OWN)
        await eventually(lambda: not harness.server.is_flushing(OWN))


@in_event_loop
async def test_request_is_sent_only_to_an_agent_that_answers_its_kind(tmp_path: Path):
    """An older agent would close the connection at an unknown message."""
    async with serving(tmp_path) as harness:
        with harness.connect() as agent:
            agent.sendall(encode(Hello("train", answers=("snapshot",))) + REPORT)
            await harness.reports()
            refused = await harness.server.ask(OWN, AgentRequest("one", "limit", 5))
            assert refused is not None
            assert refused.reason.startswith(f"train (pid {OWN.pid}) doesn't allow limits; start it with ")
            pending = asyncio.create_task(harness.server.ask(OWN, AgentRequest("two", "snapshot")))
            await asyncio.sleep(0)
            agent.settimeout(60)
            assert decode(agent.recv(4096)) == AgentRequest("two", "snapshot")
            assert not harness.server.is_flushing(OWN)
            answer = AgentResponse("two", dump=Dump("torch", "/tmp/x", 5))
            agent.sendall(encode(AgentResponse("another")) + encode(answer))
            assert await pending == answer
            unanswered = asyncio.create_task(harness.server.ask(OWN, AgentRequest("three", "snapshot")))
            await asyncio.sleep(0)
            assert await harness.server.ask(OWN, AgentRequest("four", "snapshot"), seconds=0.01) is None
        assert await unanswered is None


@in_event_loop
async def test_request_without_an_answer_is_cancelled(tmp_path: Path):
    async with serving(tmp_path) as harness:
        with harness.connect() as agent:
            agent.sendall(encode(Hello("train", answers=("limit",))) + REPORT)
            await harness.reports()
            assert await harness.server.ask(OWN, AgentRequest("one", "limit"), seconds=0.05) is None
            assert [decode(line) for line in agent.recv(4096).splitlines()] == [
                AgentRequest("one", "limit"),
                CancelFlush("one"),
            ]


@in_event_loop
async def test_agent_of_a_suspended_process_may_be_silent_and_is_asked_nothing(tmp_path: Path):
    limits = SocketLimits(stale_seconds=0.05, idle_seconds=0.2)
    async with serving(tmp_path, limits) as harness:
        with harness.connect() as agent:
            agent.sendall(encode(Hello("train", answers=("limit",))) + REPORT)
            await harness.reports()
            harness.server.set_suspended({OWN.process})
            await asyncio.sleep(1.3)  # the next sweep has passed
            (report,) = harness.server.reports()
            assert report.suspended
            assert report.age_seconds > 1.0
            answer = await harness.server.ask(OWN, AgentRequest("one", "limit"))
            assert answer is not None
            assert "suspended" in answer.reason
            harness.server.set_suspended(())
            assert [each.suspended for each in harness.server.reports()] == [False]
            await harness.reports(0)
            await eventually(lambda: harness.rejected["idle"])
