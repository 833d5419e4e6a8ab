"""A crowd of programs with agents, for ``bench.swarm``: one process says what all of them say.

    python -S -m bench.many_agents SOCKET AGENTS AGENTS_PER_USER       (root only)

Each program is a small process of its own user, which connects and hands its connection to this one; so the daemon
sees as many processes as there are agents, and is spared their processor time. What they are to say comes as JSON
lines on stdin: {"hz": 1, "seconds": 30}; what they said goes to stdout.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys

FIRST_UID = 20_000
USERS_GID = 20_000


class Program:
    """A process that connects when told, and whose connection this process may use."""

    def __init__(self, path: str, uid: int) -> None:
        self.uid = uid
        self.control, its = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            _connect_when_told(its, path, uid)
        its.close()

    def connect(self) -> socket.socket | None:
        """None if the daemon cannot be reached, or its queue is full."""
        self.control.send(b"c")
        _, descriptors, _, _ = socket.recv_fds(self.control, 1, 1)
        return Voice(self, descriptors[0]) if descriptors else None


class Voice(socket.socket):
    """A program's connection. What is sent on it has the program as its sender, as the kernel lets root say."""

    def __init__(self, program: Program, descriptor: int) -> None:
        super().__init__(fileno=descriptor)
        self.setblocking(False)
        sender = struct.pack("3i", program.pid, program.uid, USERS_GID)
        self._sender = [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, sender)]

    def send(self, data: bytes, flags: int = 0) -> int:  # type: ignore[override]
        return self.sendmsg([data], self._sender, flags)


def _connect_when_told(control: socket.socket, path: str, uid: int) -> None:
    os.dup2(control.fileno(), 3)
    os.closerange(4, 65536)
    control.detach()
    control = socket.socket(fileno=3)
    os.setgroups([])
    os.setresgid(USERS_GID, USERS_GID, USERS_GID)
    os.setresuid(uid, uid, uid)
    try:
        while control.recv(1):
            connection = socket.socket(socket.AF_UNIX)
            connection.setblocking(False)
            reached = connection.connect_ex(path) == 0
            socket.send_fds(control, [b"y" if reached else b"n"], [connection.fileno()] if reached else [])
            connection.close()
    except ConnectionError:
        pass  # who speaks for it is gone
    os._exit(0)


def main() -> None:
    path, agents, per_user = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    programs = [Program(path, FIRST_UID + number // per_user) for number in range(agents)]
    print(json.dumps([program.pid for program in programs]), flush=True)
    from bench.report_senders import Chorus  # only now: each program above is a copy of this process

    chorus = Chorus(path, programs)
    for line in sys.stdin:
        print(json.dumps(chorus.perform(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
