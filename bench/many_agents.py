"""Many programs with agents, for ``bench.swarm``: one process sends the messages of all.

python -S -m bench.many_agents SOCKET AGENTS AGENTS_PER_USER       (root only)

Each program is a small process of its own user, which connects and passes its connection to this process. So the daemon
sees one process for each agent, without their processor time. Commands are JSON lines on stdin: {"hz": 1, "seconds":
30}; the results are written to stdout.
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
    """Process that connects on request, and whose connection this process uses."""

    def __init__(self, path: str, uid: int) -> None:
        self.uid = uid
        self.control, its = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            _connect_on_request(its, path, uid)
        its.close()

    def connect(self) -> socket.socket | None:
        """Return the connection, or None if the daemon cannot be reached or its queue is full."""
        self.control.send(b"c")
        _, descriptors, _, _ = socket.recv_fds(self.control, 1, 1)
        return ProgramConnection(self, descriptors[0]) if descriptors else None


class ProgramConnection(socket.socket):
    """Connection of a program. Messages have the program as their sender, as the kernel allows root to state."""

    def __init__(self, program: Program, descriptor: int) -> None:
        super().__init__(fileno=descriptor)
        self.setblocking(False)
        sender = struct.pack("3i", program.pid, program.uid, USERS_GID)
        self._sender = [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, sender)]

    def send(self, data: bytes, flags: int = 0) -> int:  # type: ignore[override]
        return self.sendmsg([data], self._sender, flags)


def _connect_on_request(control: socket.socket, path: str, uid: int) -> None:
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
        pass  # the sending process has ended
    os._exit(0)


def main() -> None:
    path, agents, per_user = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    programs = [Program(path, FIRST_UID + number // per_user) for number in range(agents)]
    print(json.dumps([program.pid for program in programs]), flush=True)
    from bench.report_senders import ReportSenders  # each program above is a fork of this process

    senders = ReportSenders(path, programs)
    for line in sys.stdin:
        print(json.dumps(senders.send_reports(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
