"""Steps that are safe only in the main thread: executed there if the program allows it, in time or not at all."""

from __future__ import annotations

import pytest

from gpumond.facts.messages import FlushCommand, FlushResult
from tests.helpers.agent_daemon import FAKES, FakeDaemon, environment, finished, host, run_in_program
from tests.helpers.torch_program import flush_command, program, send_flush

WORKSPACES = flush_command(("workspaces", "cache"))


def allowed(setup: str = "") -> str:
    return program(setup=setup).replace("gpumond.agent.start(", "gpumond.agent.start(main_thread=True, ")


def test_main_thread_steps_are_refused_without_permission(daemon: FakeDaemon) -> None:
    with host(program(), environment(daemon.path, FAKES)) as process:
        result = send_flush(daemon, WORKSPACES)
        assert result.outcome == "freed"
        assert [(step.step, "main thread only" in step.detail) for step in result.steps] == [
            ("workspaces", True),
            ("cache", False),
        ]
        assert "clear_workspaces" not in finished(process)


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_main_thread_steps_run_in_the_main_thread_with_permission(daemon: FakeDaemon, how: str) -> None:
    code, variables = (allowed(), {}) if how == "argument" else (program(), {"GPUMOND_MAIN_THREAD": "1"})
    with host(code, environment(daemon.path, FAKES, **variables)) as process:
        daemon.wait_peer()
        assert process.stdin is not None
        process.stdin.write("while not [c for c in torch.WORLD.calls if 'workspaces' in c]: pass\n")
        process.stdin.flush()
        result = send_flush(daemon, WORKSPACES)
        assert [step.step for step in result.steps] == ["workspaces", "cache"]
        assert "clear_workspaces in MainThread" in finished(process)


def test_wait_for_a_blocked_main_thread_is_bounded(daemon: FakeDaemon) -> None:
    """The main thread is in a read. A step that timed out is not executed later."""
    with host(allowed(), environment(daemon.path, FAKES)) as process:
        result = send_flush(daemon, WORKSPACES)
        assert result.outcome == "freed"
        assert "refused: the main thread was busy" in result.steps[0].detail
        run_in_program(process, "for _ in range(100_000): pass")
        assert "clear_workspaces" not in finished(process)


def test_workspaces_are_kept_while_a_captured_graph_may_use_one(daemon: FakeDaemon) -> None:
    setup = "gpumond.agent.report(); g = torch.cuda.CUDAGraph(); g.capture_begin(); g.capture_end()"
    with host(program(setup=setup), environment(daemon.path, FAKES)) as process:
        run_in_program(process, "reason = gpumond.agent.flush(['workspaces'])[0].reason")
        run_in_program(process, "assert 'captured CUDA graph' in reason, reason")
        assert "clear_workspaces" not in finished(process)


def test_program_itself_may_run_main_thread_steps(daemon: FakeDaemon) -> None:
    with host(program(), environment(daemon.path, FAKES)) as process:
        run_in_program(process, "gpumond.agent.flush(['workspaces'])")
        assert "clear_workspaces in MainThread" in finished(process)


def test_forked_child_executes_no_pending_call_of_its_parent(daemon: FakeDaemon) -> None:
    code = """
import os, sys, threading, time
from gpumond.agent import pending_calls
done = []
asked = threading.Event()
def from_a_thread():
    pending_calls._pending_calls.append(pending_calls._PendingCall(lambda: done.append(os.getpid())).make)
    asked.set()
thread = threading.Thread(target=from_a_thread)
thread.start(); asked.wait(); thread.join()
child = os.fork()
pending_calls._make_next_call(None)
if child == 0:
    os._exit(len(done))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(done))
"""
    with host(code, environment(daemon.path), "-W", "ignore") as process:
        assert finished(process) == "0 1\n"


HANDLER = """
import os, signal, sys, threading, time
from gpumond.agent import pending_calls

class Alarm(Exception):
    def __init__(self, first, second):
        self.first = first

def handler(number, frame):
    RAISE

signal.signal(signal.SIGUSR1, handler)
answers = []
def interrupted():
    os.kill(os.getpid(), signal.NUMBER)
    for _ in range(1_000_000):
        pass
def asks():
    try:
        pending_calls.run_in_main_thread(interrupted, 20)
    except pending_calls.MainThreadBusy as busy:
        answers.append(busy)
thread = threading.Thread(target=asks, daemon=True)
thread.start()
try:
    while True:
        pass
except BaseException as error:
    thread.join(20)  # it may not have received its answer yet
    print(type(error).__name__, getattr(error, "first", ""), len(answers))
    sys.stdout.flush()
    raise
"""


@pytest.mark.parametrize(
    ("number", "raising", "status", "line"),
    [
        ("SIGUSR1", "sys.exit(7)", 7, "SystemExit  1\n"),
        ("SIGUSR1", "raise Alarm(1, 2)", 1, "Alarm 1 1\n"),
        ("SIGINT", "pass", -2, "KeyboardInterrupt  1\n"),
    ],
)
def test_exceptions_of_signal_handlers_reach_the_program(
    daemon: FakeDaemon, number: str, raising: str, status: int, line: str
) -> None:
    code = HANDLER.replace("RAISE", raising).replace("NUMBER", number)
    with host(code, environment(daemon.path)) as process:
        out, _ = process.communicate(timeout=30)
        assert (out, process.returncode) == (line, status)


def test_error_of_the_library_is_the_result(daemon: FakeDaemon) -> None:
    setup = "torch._C._cuda_clearCublasWorkspaces = lambda: 1 / 0"
    with host(allowed(setup), environment(daemon.path, FAKES)) as process:
        daemon.wait_peer()
        assert process.stdin is not None
        process.stdin.write("import time; end = time.time() + 3\nwhile time.time() < end: pass\n")
        process.stdin.flush()
        result = send_flush(daemon, FlushCommand("f1", "torch", ("workspaces", "cache")))
        assert isinstance(result, FlushResult)
        assert (result.outcome, "ZeroDivisionError" in result.reason) == ("failed", True)
        process.kill()
