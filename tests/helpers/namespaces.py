"""Programs in namespaces of their own, as in containers. Needs root."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

NEW_MOUNTS, NEW_USER, NEW_PIDS = 0x00020000, 0x10000000, 0x20000000
FIRST_UID = 100_000
"""Uid of the host that is 0 in a user namespace here, as in a container with subordinate uids."""
ISOLATED = r"""
import ctypes, os, sys
libc, (flags, uid, owner) = ctypes.CDLL(None), map(int, sys.argv[1:4])
os.setresuid(owner, owner, owner)
assert libc.unshare(flags) == 0
os.write(1, b"unshared\n")
sys.stdin.buffer.raw.read(1)
if flags & 0x20000000 and (child := os.fork()):
    os.write(1, b"%d\n" % child)
    sys.exit(os.waitpid(child, 0)[1] >> 8)
if flags & 0x00020000:
    assert libc.mount(b"none", b"/", None, 0x44000, None) == 0
    assert libc.mount(b"proc", b"/proc", b"proc", 0, None) == 0
os.setgroups([]); os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)
os.environ["HOME"] = "/tmp"
os.execv(sys.argv[4], sys.argv[4:])
"""


@contextmanager
def isolated(flags: int, uid: int, command: Sequence[str], owner: int = 0) -> Iterator[tuple[int, Callable[[], str]]]:
    """Run a program that prints ready and answers lines, with the flags of unshare(2), as ``uid`` there.

    ``owner`` makes the namespaces. Yield the program's pid, and a function that asks it.
    """
    start = [sys.executable, "-u", "-c", ISOLATED, str(flags), str(uid), str(owner), *command]
    with subprocess.Popen(start, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def asked(line: str = "\n") -> str:
            stdin.write(line.encode())
            return stdout.readline().decode().strip()

        pid = process.pid
        try:
            assert stdout.readline() == b"unshared\n"
            for name in ("uid_map", "gid_map") if flags & NEW_USER else ():
                Path(f"/proc/{pid}/{name}").write_text(f"0 {FIRST_UID} 65536")
            first = asked(".")
            if flags & NEW_PIDS:
                number, first = sorted((first, stdout.readline().decode().strip()))
                pid = int(number)
            assert first == "ready", first
            yield pid, asked
        finally:
            os.kill(pid, signal.SIGKILL)
            process.kill()
