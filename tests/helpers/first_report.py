"""Time until the daemon has received the first report of a new connection.

python -m tests.helpers.first_report SOCKET REPORTS

A bye follows each report; the daemon processes messages in order and closes the connection after the bye.
"""

from __future__ import annotations

import json
import socket
import sys
import time

from gpumond.facts.messages import Goodbye, Hello, Report, encode

SECONDS = 10.0


def first_report(path: str) -> float:
    """Return the seconds. Raises OSError or AssertionError if the daemon has not received it within ten seconds."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(SECONDS)
        began = time.monotonic()
        connection.connect(path)
        connection.sendall(encode(Hello("victim")) + encode(Report()) + encode(Goodbye()))
        assert connection.recv(1) == b""
        return time.monotonic() - began


def main() -> None:
    sys.stdout.write(json.dumps([first_report(sys.argv[1]) for _ in range(int(sys.argv[2]))]))


if __name__ == "__main__":
    main()
