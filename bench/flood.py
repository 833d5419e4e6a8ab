"""One user who floods the agents' socket, for ``bench.swarm``: messages, connections and names without end.

    python -S -m bench.flood SOCKET UID SECONDS        (root only)

Its programs are as many as one user may connect. Together they say 10,000 reports a second, as far as they are read,
each with eight names that were never used before, under a workload that is new with each connection; and each second
they knock a thousand times more.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from itertools import count

from bench.many_agents import Program, Voice

PROGRAMS = 128
REPORTS_A_SECOND = 10_000
KNOCKS_A_SECOND = 1_000
NAMES = 4
REPORTS_A_CONNECTION = 500


class Flooder:
    """One program of the flood."""

    def __init__(self, path: str, uid: int) -> None:
        self._program = Program(path, uid)
        self._voice: Voice | None = None
        self._said = 0

    def knock(self) -> None:
        if connection := self._program.connect():
            connection.close()

    def say(self, hello: bytes, report: bytes) -> str:
        """Return the outcome."""
        try:
            if self._voice is None or self._said >= REPORTS_A_CONNECTION:
                return self._begin(hello)
            self._voice.send(report)
        except BlockingIOError:
            return "reports_that_found_no_room"
        except OSError:
            self._voice = None
            return "connections_lost"
        self._said += 1
        return "reports"

    def _begin(self, hello: bytes) -> str:
        if self._voice is not None:
            self._voice.close()
        self._voice, self._said = self._program.connect(), 0
        if self._voice is None:
            return "connections_that_found_no_room"
        self._voice.send(hello)
        return "connections"


def main() -> None:
    path, uid, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    flooders = [Flooder(path, uid) for _ in range(PROGRAMS)]
    from bench.names import hello, report  # only now: each flooder is a copy of this process

    became: Counter[str] = Counter()
    fresh, knocks, turn, began = count(), 0, 0, time.monotonic()
    while (passed := time.monotonic() - began) < seconds:
        if turn > passed * REPORTS_A_SECOND:
            time.sleep(0.001)
            continue
        became[flooders[turn % PROGRAMS].say(hello(fresh), report(fresh, NAMES))] += 1
        turn += 1
        if knocks < passed * KNOCKS_A_SECOND:
            flooders[knocks % PROGRAMS].knock()
            knocks += 1
    print(json.dumps({**became, "knocks": knocks, "names": next(fresh), "seconds": seconds}))


if __name__ == "__main__":
    main()
