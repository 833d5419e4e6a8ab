"""Listener of another user, as a daemon sees it without capabilities and with CAP_SYS_PTRACE alone."""

from __future__ import annotations

import json
import os
import socket
import subprocess

import pytest

from gpumond.features.engines.ownership import PTRACE_REMEDY
from tests.helpers.users import VICTIM, obstacle, python, python_path

PROGRAM = """
import json, sys
from gpumond.features.engines.ownership import find_processes
from gpumond.features.engines.spec import Address
found = find_processes(Address("http", "127.0.0.1", int(sys.argv[1])), [])
print(json.dumps([[key.pid for key in found.listeners], found.uid, found.problem]))
"""
KERNEL = tuple(map(int, os.uname().release.split(".")[:2]))


@pytest.fixture(scope="module", autouse=True)
def other_users() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to run as another user with a capability")
    if reason := obstacle():
        pytest.skip(reason)


def seen_from(port: int, *capabilities: str) -> tuple[list[int], int | None, str]:
    """Pids of the listeners, their user and the problem, as a process of another user finds them."""
    granted = ",".join(("-all", *(f"+{name}" for name in capabilities)))
    ids = (f"--reuid={VICTIM}", f"--regid={VICTIM}", "--clear-groups")
    sets = (f"--inh-caps={granted}", f"--ambient-caps={granted}", f"--bounding-set={granted}")
    done = subprocess.run(
        ["setpriv", *ids, *sets, "--", python(), "-c", PROGRAM, str(port)],
        env={**os.environ, **python_path()},
        cwd="/",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    pids, uid, problem = json.loads(done.stdout)
    return pids, uid, problem


def test_listener_of_another_user_is_hidden_without_a_capability():
    with socket.create_server(("127.0.0.1", 0)) as server:
        pids, uid, problem = seen_from(server.getsockname()[1])
    assert (pids, uid) == ([], 0)
    assert problem.endswith(f"seeing it requires CAP_SYS_PTRACE, which the daemon lacks: {PTRACE_REMEDY}")


@pytest.mark.skipif(KERNEL < (5, 14), reason="needs Linux 5.14: fdinfo is readable with CAP_SYS_PTRACE")
def test_cap_sys_ptrace_alone_shows_the_listener_of_another_user():
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert seen_from(server.getsockname()[1], "sys_ptrace") == ([os.getpid()], 0, "")
