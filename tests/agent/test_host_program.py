"""The program of an agent is not affected by any state of the daemon."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest

from gpumond import agent
from gpumond.agent import settings
from gpumond.agent.settings import workload_name
from gpumond.facts.messages import MAX_MESSAGE_BYTES, MAX_WORKLOAD_LENGTH, FlushCommand, Goodbye, Hello, Report, encode
from gpumond.facts.pools import DEFAULT_STEPS
from tests.helpers.agent_daemon import FAKES, FakeDaemon, environment, eventually, finished, host

COUNT = """
import sys, time
import gpumond.agent
gpumond.agent.start(workload="train")
for _ in range(150):
    gpumond.agent.step()
    time.sleep(0.01)
print("done")
sys.exit(7)
"""
"""Program that runs long enough for the agent to start, connect and report."""

RUN = "import sys, gpumond.agent; gpumond.agent.start(workload='train'); sys.stdin.read(); print('done')"


def test_hello_and_bye_reach_the_daemon(daemon: FakeDaemon) -> None:
    with host(RUN, environment(daemon.path)) as process:
        hello = daemon.wait_message(Hello, process.pid)
        assert (hello.workload, hello.python_version) == ("train", sys.version.split()[0])
        assert daemon.wait_message(Report) == Report()
        assert finished(process) == "done\n"
        daemon.wait_message(Goodbye, process.pid)


def test_importing_the_agent_loads_nothing_outside_the_standard_library() -> None:
    code = """
import sys
before = set(sys.modules)
import gpumond.agent
print([n for n in set(sys.modules) - before if n.partition(".")[0] not in {"gpumond", *sys.stdlib_module_names}])
print([n for n in sys.modules if n.startswith("gpumond.")])
"""
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n['gpumond.agent']\n"


def test_running_agent_loads_nothing_outside_the_standard_library(daemon: FakeDaemon) -> None:
    code = """
import sys
before = set(sys.modules)
import gpumond.agent
gpumond.agent.start()
sys.stdin.read()
gpumond.agent.flush()
known = {"gpumond", "_xxsubinterpreters", *sys.stdlib_module_names}  # until 3.12 Python's own, though not in its list
print([n for n in set(sys.modules) - before if n.partition(".")[0] not in known])
"""
    with host(code, environment(daemon.path)) as process:
        daemon.wait_message(Report)
        assert finished(process) == "[]\n"


def test_agent_prints_nothing_without_a_daemon(tmp_path: Path) -> None:
    with host(COUNT, environment(tmp_path / "none.sock")) as process:
        assert finished(process, status=7) == "done\n"


def test_daemon_started_later_is_found(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    with host(RUN, environment(path)) as process:
        daemon = FakeDaemon(path)
        daemon.wait_message(Report, process.pid)
        finished(process)
        daemon.close()


def test_full_backlog_does_not_block_the_program(tmp_path: Path) -> None:
    path = os.fspath(tmp_path / "agent.sock")
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as waiting:
        listener.bind(path)
        listener.listen(0)
        waiting.connect(path)
        with host(COUNT, environment(path)) as process:
            assert finished(process, status=7) == "done\n"


def test_daemon_that_never_reads_does_not_block_the_program(tmp_path: Path) -> None:
    """Its socket fills with large answers, as if it was stopped."""
    path = os.fspath(tmp_path / "agent.sock")
    code = f"import torch; torch.WORLD.reset(devices=99, contexts=set(range(99))); {RUN}"
    commands = [FlushCommand(str(number), "torch", ("cache",), dry_run=True) for number in range(40)]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(8)
        with host(code, environment(path, FAKES)) as process:
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as lines:
                frames = [lines.readline(), lines.readline()]
                connection.sendall(b"".join(map(encode, commands)))
                eventually(lambda: not unread_bytes(connection))
                assert finished(process) == "done\n"
                frames += lines.readlines()
    types = [json.loads(frame)["type"] for frame in frames if frame.endswith(b"\n")]
    assert types[:2] == ["hello", "report"]
    assert types[2:].count("result") in range(1, len(commands))
    assert all(len(frame) <= MAX_MESSAGE_BYTES for frame in frames)


def unread_bytes(connection: socket.socket) -> int:
    """Return the bytes that the peer has not read."""
    return struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0]


def test_daemon_that_ends_does_not_affect_the_program_and_the_next_one_is_found(tmp_path: Path) -> None:
    """The same holds for a program that does not ignore SIGPIPE."""
    path = tmp_path / "agent.sock"
    first = FakeDaemon(path)
    with host(f"import signal; signal.signal(signal.SIGPIPE, signal.SIG_DFL); {RUN}", environment(path)) as process:
        first.wait_message(Report)
        first.peers[0].connection.shutdown(socket.SHUT_RDWR)
        first.close()
        path.unlink()
        second = FakeDaemon(path)
        second.wait_message(Report, process.pid)
        assert finished(process) == "done\n"
        second.close()


@pytest.mark.parametrize("nonsense", [b"hello?\n", b'{"v":1,"type":"exec"}\n', b"x" * 70_000])
def test_invalid_data_closes_the_connection_and_a_new_one_follows(daemon: FakeDaemon, nonsense: bytes) -> None:
    with host(RUN, environment(daemon.path)) as process:
        first = daemon.wait_peer()
        first.connection.sendall(nonsense)
        daemon.wait(lambda d: True if first.gone and len([p for p in d.peers if p.messages]) > 1 else None)
        assert finished(process) == "done\n"


def test_daemon_of_another_user_receives_nothing(tmp_path: Path) -> None:
    """The socket is the configured one."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to run a daemon as another user")
    path = os.fspath(tmp_path / "agent.sock")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgid(65534)
        os.setuid(65534)
        listener.listen(8)
        os.write(write_end, b"ready\n")
        connection, _ = listener.accept()
        os.write(write_end, connection.recv(100) or b"nothing\n")
        os._exit(0)
    os.close(write_end)
    listener.close()
    with open(read_end) as lines:
        assert lines.readline() == "ready\n"
        with host(COUNT, environment(path)) as process:
            assert finished(process, status=7) == "done\n"
        assert lines.readline() == "nothing\n"
    os.waitpid(child, 0)


def test_signals_reach_the_programs_threads_only(daemon: FakeDaemon) -> None:
    with host(RUN, environment(daemon.path)) as process:
        daemon.wait_message(Report)
        masks = [
            int(line.split()[1], 16)
            for task in Path(f"/proc/{process.pid}/task").iterdir()
            if task.name != str(process.pid)
            for line in (task / "status").read_text().splitlines()
            if line.startswith("SigBlk")
        ]
        assert masks
        for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1):
            assert all(mask >> (number - 1) & 1 for mask in masks)


def test_program_that_closes_all_descriptors_keeps_its_own_files(daemon: FakeDaemon, tmp_path: Path) -> None:
    """The program's new files get the numbers of the agent's descriptors; the agent does not write to or close them."""
    code = f"""
import os, sys, time
import gpumond.agent
gpumond.agent.start()
sys.stdin.readline()
os.closerange(3, 100)
files = [open({os.fspath(tmp_path)!r} + f"/{{i}}", "w+b", buffering=0) for i in range(12)]
gpumond.agent.start(workload="again")
sys.stdin.readline()
gpumond.agent.stop()
print([os.fstat(file.fileno()).st_size for file in files] == [0] * 12)
"""
    with host(code, environment(daemon.path)) as process:
        assert process.stdin is not None
        daemon.wait_message(Report)
        process.stdin.write("close\n")
        process.stdin.flush()
        daemon.wait(lambda d: next((h for h in d.received(Hello) if h.workload == "again"), None))
        assert finished(process) == "True\n"


def test_start_again_changes_the_name_and_the_policy(daemon: FakeDaemon) -> None:
    code = """
import sys, gpumond.agent
gpumond.agent.start()
sys.stdin.readline()
gpumond.agent.start(workload="named", flush_policy="step")
gpumond.agent.start()
sys.stdin.readline()
gpumond.agent.stop()
gpumond.agent.start()
sys.stdin.readline()
"""
    with host(code, environment(daemon.path, GPUMOND_WORKLOAD="from/env", GPUMOND_FLUSH_POLICY="never")) as process:
        assert process.stdin is not None
        assert daemon.wait_message(Hello).workload == "from/env"
        assert daemon.wait_message(Report).flush_policy == "never"
        for _ in range(2):
            received = len(daemon.received(Hello))
            process.stdin.write("\n")
            process.stdin.flush()
            daemon.wait(lambda d, received=received: d.received(Hello)[received:] or None)
            assert daemon.received(Hello)[-1].workload == "named"
        daemon.wait(lambda d: True if d.received(Report)[-1].flush_policy == "step" else None)
        finished(process)


def test_invalid_name_from_the_environment_is_ignored(daemon: FakeDaemon) -> None:
    code = "import sys, gpumond.agent; gpumond.agent.start(); sys.stdin.read()"
    with host(code, environment(daemon.path, GPUMOND_WORKLOAD=" ", GPUMOND_FLUSH_POLICY="maybe")) as process:
        assert daemon.wait_message(Hello).workload == ""
        assert daemon.wait_message(Report).flush_policy == "allow"
        finished(process)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"workload": ""}, ValueError),
        ({"workload": " \n"}, ValueError),
        ({"workload": 7}, TypeError),
        ({"flush_policy": "maybe"}, ValueError),
        ({"socket": "\0abstract"}, ValueError),
        ({"socket": 3}, TypeError),
    ],
)
def test_wrong_arguments_of_start_are_named(arguments: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error, match=f"{next(iter(arguments))}: expected"):
        agent.start(**arguments)  # type: ignore[arg-type]
    assert "gpumond-agent" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("team/llama:70b@lr=0.1 é", "team/llama:70b@lr=0.1 é"),
        (" a\nb\u202e\udcff ", "a_b__"),
        ("x" * 127 + " yz", "x" * 127),
    ],
)
def test_name_of_a_workload_is_shortened_and_made_printable(given: str, name: str) -> None:
    assert workload_name(given) == name


def test_wrong_arguments_of_the_other_calls_are_named() -> None:
    with pytest.raises(TypeError, match="on_flush: expected"):
        agent.on_flush(3)  # type: ignore[type-var]
    with pytest.raises(TypeError, match="steps: expected"):
        agent.flush("cache")
    with pytest.raises(ValueError, match="steps: expected"):
        agent.flush(["cash"])


def test_default_steps_equal_those_of_the_model() -> None:
    assert agent.flush.__defaults__ == (DEFAULT_STEPS, False)


def test_longest_name_of_a_workload_is_that_of_the_protocol() -> None:
    assert settings.MAX_WORKLOAD_LENGTH == MAX_WORKLOAD_LENGTH
