"""Repeated flushes of one program by one user.

python -m tests.isolation.flusher API_SOCKET PID SECONDS

Each answer is a JSON line: ``status``, ``released_bytes`` and ``seconds``; status 0: no answer. The end of the input
ends the program.
"""

from __future__ import annotations

import http.client
import json
import os
import select
import socket
import sys
import time

TIMEOUT_SECONDS = 30.0


def flush(path: str, pid: int) -> tuple[int, int]:
    """Return status and released bytes."""
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(TIMEOUT_SECONDS)
    try:
        connection.sock.connect(path)
        body = json.dumps({"target": {"pid": pid}})
        connection.request("POST", "/api/v1/flushes", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, json.load(answer).get("released_bytes", 0)
    except (OSError, ValueError, http.client.HTTPException):
        return 0, 0
    finally:
        connection.close()


def main() -> None:
    path, pid, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    while not select.select([0], [], [], seconds)[0]:
        began = time.monotonic()
        status, released = flush(path, pid)
        answer = {"status": status, "released_bytes": released, "seconds": round(time.monotonic() - began, 3)}
        os.write(1, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
