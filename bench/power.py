"""Loss of power at thousands of times in a daemon whose rules change: acknowledged changes that are lost.

tests/store/power.py describes the simulation of a loss of power. The same times are also evaluated for a store that
syncs less.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from bench.result import publish
from tests.store.losing_power import losses, record
from tests.store.power import Event, build, without_commit_syncs, without_syncs

EDITS = 1500
MOMENTS = 4000
LAXER_MOMENTS = 400


def main() -> None:
    logging.getLogger("gpumond.store.store").setLevel(logging.CRITICAL)  # stores that sync less are sometimes corrupt
    with tempfile.TemporaryDirectory() as directory:
        events = record(Path(directory), build(Path(directory)), EDITS)
    publish(
        "power",
        {
            "acknowledged": EDITS,
            "mib_written": round(sum(len(event.data) for event in events) / 2**20, 1),
            "syncs": sum(event.kind == "s" for event in events),
            "checkpoints": _checkpoints([event for event in events if event.kind in "ws"]),
            "power_losses": MOMENTS,
            "lost_something": losses(events, MOMENTS)[:20],
            "laxer_power_losses": LAXER_MOMENTS,
            "lost_something_with_synchronous_normal": len(losses(without_commit_syncs(events), LAXER_MOMENTS)),
            "lost_something_without_syncs": len(losses(without_syncs(events), LAXER_MOMENTS)),
        },
    )


def _checkpoints(events: Sequence[Event]) -> int:
    """Return the number of checkpoints of SQLite's write-ahead log."""
    return sum(one.path.endswith("-wal") and next_one.path.endswith(".db") for one, next_one in pairwise(events))


if __name__ == "__main__":
    main()
