"""A daemon under adverse conditions for a long time.

python -m bench.survival [--save]

python -m bench.survival --attacks [--minutes 60] [--save]

Without ``--attacks``: two simulated days of kill -9, with agents on real sockets and hostile messages; the receiver has
to be sent every alert and no other, and nothing may stay open. With it: ``bench.under_attack``.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from bench import under_attack
from bench.result import publish
from tests.soak.kills import survive

DAYS = 2.0


def main() -> None:
    if "--attacks" in sys.argv:
        publish("survival_attacks", under_attack.survive(under_attack.minutes()))
        return
    with tempfile.TemporaryDirectory() as directory:
        publish("survival", survive(Path(directory), DAYS))


if __name__ == "__main__":
    main()
