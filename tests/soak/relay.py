"""Programs whose agents send the messages of another process.

python -S -m tests.soak.relay SOCKET        (stdin: a socket)

For each descriptor received over stdin the relay starts a process and answers its pid. The process reads lines from the
descriptor: the first is its hello, each other one a report. It connects with the first report, and again after the
daemon was restarted, and ends at the end of the descriptor.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time

TIMEOUT_SECONDS = 30.0


def send_reports(path: str, control: int) -> None:
    hello, connection = b"", None
    with open(control, "rb") as lines:
        for line in lines:
            if not hello:
                hello = line
                continue
            until = time.monotonic() + TIMEOUT_SECONDS
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
    requests = socket.socket(fileno=0)
    while True:
        _, descriptors, _, _ = socket.recv_fds(requests, 1, 1)
        if not descriptors:
            return
        pid = os.fork()
        if pid == 0:
            requests.close()
            send_reports(sys.argv[1], descriptors[0])
            os._exit(0)
        os.close(descriptors[0])
        requests.sendall(b"%d\n" % pid)


if __name__ == "__main__":
    main()
