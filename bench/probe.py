"""Delay from the arrival of a report in the agent socket until the daemon reads it. For ``bench.swarm``.

    python -m bench.probe SOCKET UID SECONDS

A report and a goodbye are sent over a connection that has stood for a moment; frames are taken in their order and
after the goodbye the daemon closes, so its report was taken up before that is seen here.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator

from gpumond.protocol.messages import Bye, Hello, Report, encode

STANDING_SECONDS = 0.03
PATIENCE_SECONDS = 10.0


def latencies(path: str, seconds: float) -> Iterator[float | None]:
    """One after another; None for a connection that could not be made, or ended before."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(PATIENCE_SECONDS)
            try:
                connection.connect(path)
                connection.sendall(encode(Hello("probe")))
                time.sleep(STANDING_SECONDS)
                began = time.perf_counter()
                connection.sendall(encode(Report()) + encode(Bye()))
                over = connection.recv(1) == b""
                yield time.perf_counter() - began if over else None
            except OSError:
                yield None
                time.sleep(STANDING_SECONDS)


def main() -> None:
    path, uid, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    os.setgroups([])
    os.setuid(uid)
    seen = list(latencies(path, seconds))
    print(json.dumps({"seconds": [each for each in seen if each is not None], "failed": seen.count(None)}))


if __name__ == "__main__":
    main()
