"""What goes over the wire of scopes, steps and errors, and what an administrator may ask."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from gpumond.model.pools import FlushPolicy
from gpumond.model.program import SCOPES, Oom, Program
from gpumond.protocol.messages import MAX_MESSAGE_BYTES, AgentRequest, AgentResponse, Hello, Report, encode
from tests.agent.daemon import Daemon, environment, eventually, finished, host
from tests.agent.simulated import UUID

MIB = 1 << 20

PROGRAM = """
import sys
import gpumond.agent as agent
from gpumond.sim.allocator import CachingAllocator
from gpumond.sim.card import MIB, OutOfMemory, Spec, create
allocators = [
    CachingAllocator(create(f"DIRECTORY/card{n}", Spec(f"GPU-simulated{n or ''}", n, "sim", 1024 * MIB)))
    for n in range(DEVICES)
]
for allocator in allocators:
    allocator.malloc(50 * MIB)
def suppressed(call):
    try:
        call()
    except OutOfMemory:
        pass
agent.start(workload="team/train", allow_limit=ALLOW)
for line in sys.stdin:
    exec(line)
    print("did", line, end="", flush=True)
"""


def program(directory: Path, allow_limit: bool = False, devices: int = 1) -> str:
    code = PROGRAM.replace("DIRECTORY", os.fspath(directory)).replace("DEVICES", str(devices))
    return code.replace("ALLOW", str(allow_limit))


def tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
    assert process.stdout.readline() == f"did {line}\n"


def attempt(call: str) -> str:
    """A line that makes the call and passes over its error."""
    return f"suppressed(lambda: {call})"


def told(daemon: Daemon) -> Program:
    return daemon.heard(Report)[-1].program


def test_scopes_steps_and_errors_are_in_the_next_report(daemon: Daemon, tmp_path: Path):
    with host(program(tmp_path), environment(daemon.path)) as process:
        daemon.wait_message(Report)
        tell(process, "for _ in range(7): agent.step()")
        tell(process, "with agent.scope('epoch'): allocator.malloc(100 * MIB)")
        tell(process, attempt("agent.retry_on_oom(allocator.malloc, attempts=2)(2000 * MIB)"))
        daemon.wait(lambda _: told(daemon).ooms[1:] or None)
        seen = told(daemon)
        (scope,) = seen.scopes
        assert (scope.name, scope.devices[0].kept_bytes) == ("epoch", 100 * MIB)
        assert seen.step is not None
        assert seen.step.steps == 7
        assert [oom.request_bytes for oom in seen.ooms] == [2000 * MIB] * 2
        assert (seen.oom_retries, seen.oom_rescues) == (1, 0)
        finished(process)


def test_an_error_outside_scopes_is_in_the_report(daemon: Daemon, tmp_path: Path):
    with host(program(tmp_path), environment(daemon.path)) as process:
        daemon.wait_message(Report)
        tell(process, attempt("allocator.malloc(2000 * MIB)"))
        daemon.wait(lambda _: told(daemon).ooms or None)
        (oom,) = told(daemon).ooms
        assert (oom.seen, oom.device_uuid) == ("counter", UUID)
        finished(process)


def test_a_report_never_exceeds_the_message_limit(daemon: Daemon, tmp_path: Path):
    """With 16 devices and all the names that it may have it loses scopes, not pools."""
    with host(program(tmp_path, devices=16), environment(daemon.path)) as process:
        daemon.wait_message(Report)
        tell(process, "for n in range(50): exec('with agent.scope(\"x\" * 60 + str(n)): pass')")
        tell(process, attempt("agent.scope('y')(allocator.malloc)(2000 * MIB)"))
        daemon.wait(lambda _: told(daemon).scopes or None)
        report = daemon.heard(Report)[-1]
        assert len(report.pools) == 16
        assert 0 < len(report.program.scopes) <= SCOPES + 1
        assert len(encode(report)) <= MAX_MESSAGE_BYTES
        finished(process)


def test_a_forked_child_counts_from_nothing(daemon: Daemon, tmp_path: Path):
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
    told = agent.program()
    os._exit(0 if ([scope.name for scope in told.scopes], told.step.steps) == (["worker"], 1) else 1)
_, status = os.waitpid(child, 0)
told = agent.program()
print(os.waitstatus_to_exitcode(status), [scope.name for scope in told.scopes], told.step.steps)
"""
    with host(code, environment(daemon.path)) as process:
        assert finished(process) == "0 ['epoch'] 1\n"


def ask(daemon: Daemon, ask: AgentRequest) -> AgentResponse:
    daemon.wait_message(Report)
    daemon.wait_peer().send(ask)
    return daemon.wait_message(AgentResponse)


def test_a_limit_from_outside_holds_if_the_program_allows_it(daemon: Daemon, tmp_path: Path):
    with host(program(tmp_path, allow_limit=True), environment(daemon.path)) as process:
        assert daemon.wait_message(Hello).answers == ("limit", "snapshot")
        answer = ask(daemon, AgentRequest("a1", "limit", 300 * MIB))
        assert (answer.id, answer.reason, answer.limits[0].limit_bytes) == ("a1", "", 300 * MIB)
        tell(process, "assert allocator.limit_bytes == 300 * MIB")
        finished(process)


def test_a_limit_from_outside_is_refused_otherwise(daemon: Daemon, tmp_path: Path):
    """Also by an agent whose daemon does not heed what it says it answers."""
    with host(program(tmp_path), environment(daemon.path)) as process:
        assert daemon.wait_message(Hello).answers == ("snapshot",)
        answer = ask(daemon, AgentRequest("a1", "limit", 300 * MIB))
        assert answer.limits == ()
        assert "allow_limit=True" in answer.reason
        tell(process, "assert allocator.limit_bytes is None")
        tell(process, "agent.start(allow_limit=True)")
        daemon.wait(lambda d: True if d.heard(Hello)[-1].answers == ("limit", "snapshot") else None)
        finished(process)


def test_the_environment_may_allow_it(daemon: Daemon, tmp_path: Path):
    code = "import sys, gpumond.agent; gpumond.agent.start(); sys.stdin.read()"
    with host(code, environment(daemon.path, GPUMOND_ALLOW_LIMIT="1")) as process:
        assert daemon.wait_message(Hello).answers == ("limit", "snapshot")
        finished(process)


def test_a_requested_snapshot_is_in_the_users_directory(daemon: Daemon, tmp_path: Path):
    environ = environment(daemon.path, XDG_STATE_HOME=os.fspath(tmp_path / "state"))
    with host(program(tmp_path), environ) as process:
        answer = ask(daemon, AgentRequest("s1", "snapshot"))
        assert answer.dump is not None
        assert answer.dump.path is not None
        path = Path(answer.dump.path)
        assert path.parent == tmp_path / "state" / "gpumond" / "snapshots"
        assert path.stat().st_size == answer.dump.size_bytes
        daemon.wait_peer().send(AgentRequest("s2", "snapshot"))
        eventually(lambda: len(daemon.heard(AgentResponse)) == 2)
        assert "too many requests" in daemon.heard(AgentResponse)[1].reason
        finished(process)


@pytest.mark.parametrize("policy", ["step", "never"])
def test_requests_are_answered_with_each_flush_policy(daemon: Daemon, tmp_path: Path, policy: FlushPolicy):
    code = program(tmp_path).replace('"team/train"', f'"train", flush_policy="{policy}"')
    with host(code, environment(daemon.path, XDG_STATE_HOME=os.fspath(tmp_path / "state"))) as process:
        answer = ask(daemon, AgentRequest("s1", "snapshot"))
        assert answer.dump is not None
        assert answer.dump.path is not None
        finished(process)


def test_an_old_agents_report_has_no_program_part():
    """An older agent's report has no program, an older daemon ignores it."""
    assert Report().program == Program()
    assert Oom(number=1, at=2.0, seen="scope").pools == ()
