"""Distinct series that one machine exports in a day of program starts, with and without those of programs.

python -m bench.series_of_a_day [--starts 200] [--save]

The machine has 8 devices. Each program has an agent with one pool on one device, runs for three minutes, and is one of
20 workloads of 3 users; or, in the worst case, has a workload of its own. The pages are the daemon's own, every fifth
start.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from bench.result import publish
from gpumond.facts.frame import Frame
from gpumond.facts.snapshot import Owner
from gpumond.metrics.exposition import Exposition, Group, ScrapeFormat
from gpumond.metrics.owners import owners_with_series
from gpumond.metrics.telemetry import Telemetry
from gpumond.tick.ledger import make_ledger
from tests.helpers.agents import GIB
from tests.helpers.values import make_device, make_pool, make_process, make_report, make_snapshot

DEVICES, WORKLOADS, USERS = 8, 20, 3
RUNNING = 10
"""Programs at a time: with 200 starts an hour, each runs for three minutes."""
SCRAPED = 5
"""Starts between two scrapes."""
BOUNDED: frozenset[Group] = frozenset(("device", "owner", "daemon"))
EVERYTHING: frozenset[Group] = BOUNDED | {"process"}


def frame(numbers: range, at: float, own_workload: bool, before: dict[Owner, float]) -> Frame:
    """Return the frame in which the programs with these numbers run."""
    reports = tuple(
        make_report(
            10_000 + number,
            (make_pool(f"GPU-{number % DEVICES}", live=4 * GIB, cached=2 * GIB, stranded=GIB),),
            workload=f"run-{number}" if own_workload else f"train-{number % WORKLOADS}",
        )
        for number in numbers
    )
    devices = (
        make_device(
            f"GPU-{index}",
            index=index,
            name="NVIDIA H100 80GB HBM3",
            used_bytes=32 * GIB,
            processes=tuple(
                replace(make_process(10_000 + number, 8 * GIB), user=f"user{number % USERS}", comm="python")
                for number in numbers
                if number % DEVICES == index
            ),
        )
        for index in range(DEVICES)
    )
    snapshot = make_snapshot(*devices, reports=reports, elapsed_seconds=at)
    return Frame(snapshot, make_ledger(snapshot), owners=owners_with_series(before, snapshot))


def series_of_a_day(groups: frozenset[Group], own_workload: bool = False, starts: int = 200) -> dict[str, int]:
    """Return the series of the first page, and the new ones of a day after it."""
    telemetry, owners = Telemetry(), dict[Owner, float]()
    exposition = Exposition(telemetry)
    first, seen = 0, set[str]()
    for number in range(0, 24 * starts + 1, SCRAPED):
        now = frame(range(max(0, number - RUNNING), number), number * 3600.0 / starts, own_workload, owners)
        owners = dict(now.owners or {})
        current = (each for each, last in owners.items() if last == now.snapshot.elapsed_seconds and each.workload)
        telemetry.workloads.set_connected(each.workload for each in current)
        text = exposition.scrape(now, ScrapeFormat(False, groups=groups)).body.decode()
        seen.update(line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#"))
        first = first or len(seen)
    return {"first_page": first, "new_in_a_day": len(seen) - first}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=200, help="program starts an hour")
    parser.add_argument("--save", action="store_true", help="store the figures in bench/results")
    starts = parser.parse_args().starts
    cases = {"known_workloads": False, "own_workloads": True}
    figures: dict[str, object] = {
        name: {
            "without_programs": series_of_a_day(BOUNDED, own, starts),
            "with_programs": series_of_a_day(EVERYTHING, own, starts),
        }
        for name, own in cases.items()
    }
    publish("series_of_a_day", {"starts_an_hour": starts, **figures})


if __name__ == "__main__":
    main()
