"""Delay from the arrival of a report in the agent socket until the daemon reads it. For ``bench.swarm``.

python -m bench.probe SOCKET UID SECONDS

A report and a bye are sent over an existing connection. The daemon processes messages in order and closes the
connection after the bye, so the report was processed before.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator

from gpumond.facts.messages import Goodbye, Hello, Report, encode

CONNECTED_SECONDS = 0.03
TIMEOUT_SECONDS = 10.0


def latencies(path: str, seconds: float) -> Iterator[float | None]:
    """Yield the delays one after another; None for a connection that failed or ended early."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(TIMEOUT_SECONDS)
            try:
                connection.connect(path)
                connection.sendall(encode(Hello("probe")))
                time.sleep(CONNECTED_SECONDS)
                began = time.perf_counter()
                connection.sendall(encode(Report()) + encode(Goodbye()))
                over = connection.recv(1) == b""
                yield time.perf_counter() - began if over else None
            except OSError:
                yield None
                time.sleep(CONNECTED_SECONDS)


def main() -> None:
    path, uid, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    os.setgroups([])
    os.setuid(uid)
    found = list(latencies(path, seconds))
    print(json.dumps({"seconds": [each for each in found if each is not None], "failed": found.count(None)}))


if __name__ == "__main__":
    main()
