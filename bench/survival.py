"""Two simulated days of kill -9, with agents on real sockets and hostile frames: is the receiver told everything, and
nothing else, and does anything stay open."""

from __future__ import annotations

import tempfile
from pathlib import Path

from bench.result import publish
from tests.soak.kills import survive

DAYS = 2.0


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        publish("survival", survive(Path(directory), DAYS))


if __name__ == "__main__":
    main()
