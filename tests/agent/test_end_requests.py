"""``on_end_request``: the program's own function is called, and nothing else happens to the program."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpumond import agent
from gpumond.facts.messages import AgentRequest, AgentResponse, Hello, Report
from tests.helpers.agent_daemon import FakeDaemon, environment, finished, host, run_in_program
from tests.helpers.scoped_program import program

ASK = AgentRequest("e1", "end")


def answer(daemon: FakeDaemon, request: AgentRequest = ASK) -> AgentResponse:
    daemon.wait_peer().send(request)
    found: AgentResponse = daemon.wait(
        lambda _: next((each for each in daemon.received(AgentResponse) if each.id == request.id), None)
    )
    return found


def registered(daemon: FakeDaemon) -> None:
    """Wait until the agent declares that the program has a function."""
    daemon.wait(lambda _: "end" in daemon.received(Hello)[-1].answers or None)
    hellos = len(daemon.received(Hello))
    assert hellos == 2


def test_registered_function_is_called_in_a_thread_of_its_own(daemon: FakeDaemon, tmp_path: Path):
    with host(program(tmp_path), environment(daemon.path)) as process:
        daemon.wait_message(Report)
        assert "end" not in daemon.received(Hello)[-1].answers
        run_in_program(process, "import threading; calls, called = [], threading.Event()")
        run_in_program(process, "agent.on_end_request(lambda: calls.append(threading.current_thread().name))")
        run_in_program(process, "agent.on_end_request(called.set)")
        registered(daemon)
        assert answer(daemon).reason == ""
        run_in_program(process, "assert called.wait(30); assert calls == ['gpumond-end'], calls")
        finished(process)


def test_function_that_fails_or_exits_changes_nothing(daemon: FakeDaemon, tmp_path: Path):
    with host(program(tmp_path), environment(daemon.path)) as process:
        daemon.wait_message(Report)
        run_in_program(process, "import threading; called = threading.Event()")
        run_in_program(process, "agent.on_end_request(lambda: 1 / 0); agent.on_end_request(sys.exit)")
        run_in_program(process, "agent.on_end_request(called.set)")
        registered(daemon)
        assert answer(daemon).reason == ""
        run_in_program(process, "assert called.wait(30)")
        finished(process)


def test_function_that_blocks_delays_no_report_and_is_called_once(daemon: FakeDaemon, tmp_path: Path):
    with host(program(tmp_path), environment(daemon.path)) as process:
        daemon.wait_message(Report)
        run_in_program(process, "import threading; release = threading.Event(); calls = []")
        run_in_program(process, "agent.on_end_request(lambda: calls.append(1) or release.wait())")
        registered(daemon)
        assert answer(daemon).reason == ""
        assert "still running" in answer(daemon, AgentRequest("e2", "end")).reason
        before = len(daemon.received(Report))
        daemon.wait(lambda _: len(daemon.received(Report)) > before + 1 or None)
        run_in_program(process, "assert calls == [1]; release.set()")
        finished(process)


def test_program_without_a_function_is_not_ended(daemon: FakeDaemon, tmp_path: Path):
    with host(program(tmp_path), environment(daemon.path)) as process:
        daemon.wait_message(Report)
        assert "gpumond.agent.on_end_request" in answer(daemon).reason
        run_in_program(process, "pass")
        finished(process)


def test_wrong_argument_is_named():
    with pytest.raises(TypeError, match="on_end_request: expected a function"):
        agent.on_end_request(3)  # type: ignore[type-var]
