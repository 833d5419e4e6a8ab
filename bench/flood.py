"""One user who floods the agents' socket, for ``bench.swarm``: endless messages, connections and names.

python -S -m bench.flood SOCKET UID SECONDS        (root only)

The user has the maximum number of connected programs. Together they send up to 10,000 reports a second, each with eight
new names, under a workload that is new for each connection. In addition they open and close a thousand connections a
second.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from itertools import count

from bench.many_agents import Program, ProgramConnection

PROGRAMS = 128
REPORTS_PER_SECOND = 10_000
CONNECTS_PER_SECOND = 1_000
NAMES = 4
REPORTS_PER_CONNECTION = 500


class Flooder:
    """One program of the flood."""

    def __init__(self, path: str, uid: int) -> None:
        self._program = Program(path, uid)
        self._connection: ProgramConnection | None = None
        self._sent = 0

    def connect_and_close(self) -> None:
        if connection := self._program.connect():
            connection.close()

    def send_report(self, hello: bytes, report: bytes) -> str:
        """Return the outcome."""
        try:
            if self._connection is None or self._sent >= REPORTS_PER_CONNECTION:
                return self._reconnect(hello)
            self._connection.send(report)
        except BlockingIOError:
            return "reports_that_found_no_room"
        except OSError:
            self._connection = None
            return "connections_lost"
        self._sent += 1
        return "reports"

    def _reconnect(self, hello: bytes) -> str:
        if self._connection is not None:
            self._connection.close()
        self._connection, self._sent = self._program.connect(), 0
        if self._connection is None:
            return "connections_that_found_no_room"
        self._connection.send(hello)
        return "connections"


def main() -> None:
    path, uid, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    flooders = [Flooder(path, uid) for _ in range(PROGRAMS)]
    from bench.names import (  # imported here, because each flooder is a fork of this process
        hello_message,
        report_message,
    )

    outcomes: Counter[str] = Counter()
    fresh, connects, sent, began = count(), 0, 0, time.monotonic()
    while (passed := time.monotonic() - began) < seconds:
        if sent > passed * REPORTS_PER_SECOND:
            time.sleep(0.001)
            continue
        outcomes[flooders[sent % PROGRAMS].send_report(hello_message(fresh), report_message(fresh, NAMES))] += 1
        sent += 1
        if connects < passed * CONNECTS_PER_SECOND:
            flooders[connects % PROGRAMS].connect_and_close()
            connects += 1
    print(json.dumps({**outcomes, "knocks": connects, "names": next(fresh), "seconds": seconds}))


if __name__ == "__main__":
    main()
