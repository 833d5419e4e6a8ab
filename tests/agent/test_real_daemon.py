"""Program with the agent and the real daemon in all its states."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from gpumond.facts.messages import FlushCommand, Hello, Report, decode, encode
from tests.helpers.agent_daemon import FakeDaemon, environment, finished, host
from tests.helpers.running import RunningDaemon, until

PROGRAM = """
import gpumond.agent, time
gpumond.agent.start(workload="steady")
for count in range(60):
    print(count)
    time.sleep(0.05)
raise SystemExit(7)
"""
OUTPUT = "".join(f"{count}\n" for count in range(60))


@pytest.mark.parametrize("fate", ["left alone", "stopped", "killed", "gone from the start"])
def test_output_and_exit_code_of_the_program_do_not_depend_on_the_daemon(
    serve: Callable[..., RunningDaemon], tmp_path: Path, fate: str
):
    daemon = serve("--source", "sim", environ={"GPUMOND_SIM_DIR": str(tmp_path)})
    until(lambda: daemon.request("/api/v1/agents")[0] == 200)  # the import of the routes may outlast the program
    if fate == "gone from the start":
        daemon.stop()
    with host(PROGRAM, environment(daemon.socket)) as process:
        if fate in ("stopped", "killed"):
            until(lambda: daemon.request("/api/v1/agents")[0] == 200 and daemon.get("agents"))
            os.kill(daemon.process.pid, signal.SIGSTOP if fate == "stopped" else signal.SIGKILL)
        assert finished(process, status=7) == OUTPUT
    if fate == "stopped":
        os.kill(daemon.process.pid, signal.SIGCONT)
    if fate == "killed":
        daemon.process.wait()


def test_incomplete_message_of_an_ending_daemon_is_no_command(tmp_path: Path):
    path = tmp_path / "agent.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(path))
        listener.listen(1)
        with host(PROGRAM, environment(path)) as process:
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as lines:
                assert isinstance(decode(lines.readline()), Hello)
                connection.sendall(encode(FlushCommand("one", "sim", ("cache",)))[:-5])
            listener.close()
            path.unlink()
            successor = FakeDaemon(path)
            successor.wait_message(Report, process.pid)
            assert finished(process, status=7) == OUTPUT
            successor.close()
