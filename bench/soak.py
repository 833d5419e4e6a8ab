"""Seven simulated days of churn, rule edits and faults: growth of memory, missed alerts, and open resources.

bench.survival is the same with real sockets and kills. `--days 0.2` runs for a short time.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from pathlib import Path

from bench.result import publish
from tests.soak.week import run_week

DAYS = 7.0
CHURN = 9
"""A million programs in seven days."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--days", type=float, default=DAYS)
    parser.add_argument("--churn", type=int, default=CHURN, help="programs that begin on a device every ten seconds")
    parser.add_argument("--save", action="store_true", help="keep the result")
    arguments = parser.parse_args()
    logging.getLogger("gpumond.features.alerts.receivers").setLevel(
        logging.ERROR
    )  # such a receiver is part of the test
    with tempfile.TemporaryDirectory() as directory:
        publish("soak", run_week(Path(directory), arguments.days, churn=arguments.churn))


if __name__ == "__main__":
    main()
