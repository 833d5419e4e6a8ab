"""The checkpoint process has the rights of the program's user, also in the user namespace of a container."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpumond.facts.messages import to_json
from gpumond.features.suspend.checkpoint_process import CheckpointRequest
from gpumond.host.machine import read_start_ticks
from tests.helpers.namespaces import FIRST_UID, NEW_MOUNTS, NEW_PIDS, NEW_USER, isolated

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
CODE = """
import os, sys
from gpumond.facts.messages import from_json
from gpumond.features.suspend.checkpoint_process import CheckpointRequest, become_user
request = from_json(CheckpointRequest, sys.argv[1].encode())
if sys.argv[2] == "outside":
    os.setgroups([]); os.setresgid(*[request.uid] * 3); os.setresuid(*[request.uid] * 3)
become_user(request)
try:
    os.close(os.open(f"/proc/{request.pid}/mem", os.O_RDWR))
    reached = "reached"
except PermissionError:
    reached = "refused"
print(os.stat(f"/proc/self").st_uid, os.getgroups(), reached)
"""


def access(pid: int, uid: int, where: str, *prefix: str) -> str:
    """Return the user on the host of a process that took a program's user, and whether it reaches the program."""
    request = CheckpointRequest(action="settle", pid=pid, start_ticks=read_start_ticks(pid) or 0, uid=uid)
    command = [*prefix, sys.executable, "-c", CODE, to_json(request).decode(), where]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or done.stderr


@pytest.mark.parametrize("inside", [0, 1000])
@pytest.mark.parametrize("flags", [NEW_USER, NEW_USER | NEW_MOUNTS | NEW_PIDS])
def test_checkpoint_process_reaches_a_program_in_a_user_namespace_as_its_user(flags: int, inside: int) -> None:
    with isolated(flags, inside, ["/bin/sh", "-c", "echo ready; read line"]) as (pid, _):
        uid = Path(f"/proc/{pid}").stat().st_uid
        assert uid == FIRST_UID + inside
        assert access(pid, uid, "helper").split(" ")[1:] == ["[]", "reached"]
        assert access(pid, uid, "outside").split(" ")[1:] == ["[]", "refused"]


def test_checkpoint_process_takes_the_user_of_a_program_of_the_host() -> None:
    with isolated(0, 65534, ["/bin/sh", "-c", "echo ready; read line"]) as (pid, _):
        assert access(pid, 65534, "helper") == "65534 [] reached"


@pytest.mark.needs("setpriv")
def test_checkpoint_process_needs_no_more_than_the_capabilities_of_the_documentation() -> None:
    few = ("setpriv", "--bounding-set=-all,+setuid,+setgid")
    more = ("setpriv", "--bounding-set=-all,+setuid,+setgid,+sys_ptrace,+sys_admin")
    command = ["/bin/sh", "-c", "echo ready; read line"]
    with isolated(0, 65534, command) as (pid, _):
        assert access(pid, 65534, "helper", *few) == "65534 [] reached"
    with isolated(NEW_USER, 1000, command, owner=65534) as (pid, _):  # as in a rootless container
        uid = FIRST_UID + 1000
        assert access(pid, uid, "helper", *few) == f"{uid} [] refused"
        assert access(pid, uid, "helper", *more) == "1000 [] reached"
