"""Programs whose agents say what somebody else tells them to.

    python -S -m tests.soak.relay SOCKET        (stdin: a socket)

For each descriptor that comes over stdin one process is made, and its pid is the answer. It reads lines from that
descriptor: the first is its hello, each other one a report. It connects with the first report, and again whenever the
daemon is another one; where the descriptor ends, it ends.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time

PATIENCE_SECONDS = 30.0


def speak(path: str, control: int) -> None:
    hello, connection = b"", None
    with open(control, "rb") as lines:
        for line in lines:
            if not hello:
                hello = line
                continue
            until = time.monotonic() + PATIENCE_SECONDS
            while time.monotonic() < until:
                try:
                    if connection is None:
                        connection = socket.socket(socket.AF_UNIX)
                        connection.connect(path)
                        connection.sendall(hello)
                    connection.sendall(line)
                    break
                except OSError:
                    connection = None
                    time.sleep(0.01)


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    asked = socket.socket(fileno=0)
    while True:
        _, descriptors, _, _ = socket.recv_fds(asked, 1, 1)
        if not descriptors:
            return
        pid = os.fork()
        if pid == 0:
            asked.close()
            speak(sys.argv[1], descriptors[0])
            os._exit(0)
        os.close(descriptors[0])
        asked.sendall(b"%d\n" % pid)


if __name__ == "__main__":
    main()
