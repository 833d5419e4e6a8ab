"""Scopes, steps, errors and pinned host memory in messages, and the requests that an administrator may send."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpumond.facts.messages import MAX_MESSAGE_BYTES, AgentRequest, AgentResponse, Hello, Report, encode
from gpumond.facts.pools import FlushPolicy, HostPool
from gpumond.facts.program import MAX_SCOPES, Oom, Program
from tests.helpers.agent_daemon import FAKES, FakeDaemon, environment, eventually, finished, host, run_in_program
from tests.helpers.scoped_program import MIB, WORKLOAD, attempt, program
from tests.helpers.simulated import UUID


def newest_program(daemon: FakeDaemon) -> Program:
    return daemon.received(Report)[-1].program


def test_scopes_steps_and_errors_are_in_the_next_report(daemon: FakeDaemon, tmp_path: Path):
    with host(program(tmp_path), environment(daemon.path)) as process:
        daemon.wait_message(Report)
        run_in_program(process, "for _ in range(7): agent.step()")
        run_in_program(process, "with agent.scope('epoch'): allocator.malloc(100 * MIB)")
        run_in_program(process, attempt("agent.retry_on_oom(allocator.malloc, attempts=2)(2000 * MIB)"))
        daemon.wait(lambda _: newest_program(daemon).ooms[1:] or None)
        newest = newest_program(daemon)
        (scope,) = newest.scopes
        assert (scope.name, scope.devices[0].retained_bytes) == ("epoch", 100 * MIB)
        assert newest.step is not None
        assert newest.step.steps == 7
        assert [oom.request_bytes for oom in newest.ooms] == [2000 * MIB] * 2
        assert (newest.oom_retries, newest.oom_recovered) == (1, 0)
        finished(process)


def test_error_outside_scopes_is_in_the_report(daemon: FakeDaemon, tmp_path: Path):
    with host(program(tmp_path), environment(daemon.path)) as process:
        daemon.wait_message(Report)
        run_in_program(process, attempt("allocator.malloc(2000 * MIB)"))
        daemon.wait(lambda _: newest_program(daemon).ooms or None)
        (oom,) = newest_program(daemon).ooms
        assert (oom.seen, oom.device_uuid) == ("counter", UUID)
        finished(process)


def test_report_never_exceeds_the_message_limit(daemon: FakeDaemon, tmp_path: Path):
    """With 16 devices and the maximum of names it drops scopes, not pools."""
    with host(program(tmp_path, devices=16), environment(daemon.path)) as process:
        daemon.wait_message(Report)
        run_in_program(process, "for n in range(50): exec('with agent.scope(\"x\" * 60 + str(n)): pass')")
        run_in_program(process, attempt("agent.scope('y')(allocator.malloc)(2000 * MIB)"))
        daemon.wait(lambda _: newest_program(daemon).scopes or None)
        report = daemon.received(Report)[-1]
        assert len(report.pools) == 16
        assert 0 < len(report.program.scopes) <= MAX_SCOPES + 1
        assert len(encode(report)) <= MAX_MESSAGE_BYTES
        finished(process)


def test_forked_child_counts_from_zero(daemon: FakeDaemon, tmp_path: Path):
    code = """
import os, sys
import gpumond.agent as agent
agent.start()
agent.step()
with agent.scope("epoch"):
    pass
child = os.fork()
if child == 0:
    agent.step()
    with agent.scope("worker"):
        pass
    own = agent.program()
    os._exit(0 if ([scope.name for scope in own.scopes], own.step.steps) == (["worker"], 1) else 1)
_, status = os.waitpid(child, 0)
own = agent.program()
print(os.waitstatus_to_exitcode(status), [scope.name for scope in own.scopes], own.step.steps)
"""
    with host(code, environment(daemon.path)) as process:
        assert finished(process) == "0 ['epoch'] 1\n"


def send_request(daemon: FakeDaemon, request: AgentRequest) -> AgentResponse:
    daemon.wait_message(Report)
    daemon.wait_peer().send(request)
    return daemon.wait_message(AgentResponse)


def test_requested_limit_is_applied_if_the_program_allows_it(daemon: FakeDaemon, tmp_path: Path):
    with host(program(tmp_path, allow_limit=True), environment(daemon.path)) as process:
        assert "limit" in daemon.wait_message(Hello).answers
        answer = send_request(daemon, AgentRequest("a1", "limit", 300 * MIB))
        assert (answer.id, answer.reason, answer.limits[0].limit_bytes) == ("a1", "", 300 * MIB)
        run_in_program(process, "assert allocator.limit_bytes == 300 * MIB")
        finished(process)


def test_requested_limit_is_refused_otherwise(daemon: FakeDaemon, tmp_path: Path):
    """The same holds for an agent whose daemon ignores the answers that it declares."""
    with host(program(tmp_path), environment(daemon.path)) as process:
        assert "limit" not in daemon.wait_message(Hello).answers
        answer = send_request(daemon, AgentRequest("a1", "limit", 300 * MIB))
        assert answer.limits == ()
        assert "allow_limit=True" in answer.reason
        run_in_program(process, "assert allocator.limit_bytes is None")
        run_in_program(process, "agent.start(allow_limit=True)")
        daemon.wait(lambda d: "limit" in d.received(Hello)[-1].answers or None)
        finished(process)


def test_requested_limit_may_be_allowed_by_the_environment(daemon: FakeDaemon, tmp_path: Path):
    code = "import sys, gpumond.agent; gpumond.agent.start(); sys.stdin.read()"
    with host(code, environment(daemon.path, GPUMOND_ALLOW_LIMIT="1")) as process:
        assert "limit" in daemon.wait_message(Hello).answers
        finished(process)


def test_requested_snapshot_is_in_the_users_directory(daemon: FakeDaemon, tmp_path: Path):
    environ = environment(daemon.path, XDG_STATE_HOME=os.fspath(tmp_path / "state"))
    with host(program(tmp_path), environ) as process:
        answer = send_request(daemon, AgentRequest("s1", "snapshot"))
        assert answer.dump is not None
        assert answer.dump.path is not None
        path = Path(answer.dump.path)
        assert path.parent == tmp_path / "state" / "gpumond" / "snapshots"
        assert path.stat().st_size == answer.dump.size_bytes
        daemon.wait_peer().send(AgentRequest("s2", "snapshot"))
        eventually(lambda: len(daemon.received(AgentResponse)) == 2)
        assert "too many requests" in daemon.received(AgentResponse)[1].reason
        finished(process)


@pytest.mark.parametrize("policy", ["step", "never"])
def test_requests_are_answered_with_each_flush_policy(daemon: FakeDaemon, tmp_path: Path, policy: FlushPolicy):
    code = program(tmp_path).replace(f"{WORKLOAD!r}", f'"train", flush_policy="{policy}"')
    with host(code, environment(daemon.path, XDG_STATE_HOME=os.fspath(tmp_path / "state"))) as process:
        answer = send_request(daemon, AgentRequest("s1", "snapshot"))
        assert answer.dump is not None
        assert answer.dump.path is not None
        finished(process)


def test_old_agents_report_has_no_program_part():
    """The report of an older agent has no program; an older daemon ignores it."""
    assert Report().program == Program()
    assert Oom(number=1, at=2.0, seen="scope").pools == ()


PROGRAM = """
import sys, torch
torch.WORLD.reset(host={statistics})
import gpumond.agent
gpumond.agent.start()
sys.stdin.read()
"""


def test_report_contains_pinned_host_memory(daemon: FakeDaemon) -> None:
    code = PROGRAM.format(statistics={"allocated_bytes": 96, "active_bytes": 64})
    with host(code, environment(daemon.path, FAKES)) as process:
        assert daemon.wait_message(Report).host_pools == (HostPool("torch", 64, 96),)
        assert finished(process) == ""


def test_failing_host_pool_leaves_the_report_complete(daemon: FakeDaemon) -> None:
    code = PROGRAM.format(statistics={"allocated_bytes": "much", "active_bytes": "more"})
    with host(code, environment(daemon.path, FAKES)) as process:
        report = daemon.wait_message(Report)
        assert (report.frameworks, report.host_pools) == (("torch 2.13.0",), ())
        assert finished(process) == ""
