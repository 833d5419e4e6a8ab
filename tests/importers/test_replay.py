"""A recording, or a log of the same, gives the verdicts that were given live."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice

import pytest

from gpumond.diagnosis import Diagnosis, diagnose
from gpumond.importers import Changes
from gpumond.loadgen import plan
from gpumond.model.snapshot import Snapshot
from gpumond.protocol.messages import to_json
from tests.importers.reading import read
from tests.simulator.snapshots import snapshots as virtual

Said = list[tuple[float, bool, str, int | None]]


def verdicts(snapshots: Iterable[Snapshot]) -> Said:
    diagnosis, changes, said = Diagnosis(), Changes(), []
    for snapshot in snapshots:
        diagnosis = diagnose(diagnosis, snapshot)
        for change in changes.update(diagnosis.verdicts, snapshot.taken_at):
            said.append((change.at, change.onset, change.verdict.kind, change.verdict.pid))
    return said


def as_csv(snapshots: Iterable[Snapshot]) -> Iterator[str]:
    yield "time,uuid,pid,used_bytes,size_bytes,utilization\n"
    for snapshot in snapshots:
        for device in snapshot.devices:
            load = device.sensors.gpu_utilization_ratio
            yield f"{snapshot.taken_at},{device.uuid},,{device.used_bytes},{device.size_bytes},{load}\n"
            for process in device.processes or ():
                yield f"{snapshot.taken_at},{device.uuid},{process.pid},{process.used_bytes},,\n"


@pytest.fixture(scope="module")
def live() -> list[Snapshot]:
    """A program that fills its device and crashes, on a daemon that has just started."""
    seen = list(islice(virtual(plan("crash", seed=1)), 1200))
    start = seen[0].elapsed_seconds
    return [replace(snapshot, elapsed_seconds=snapshot.elapsed_seconds - start) for snapshot in seen]


def test_a_replay_says_what_was_said_live(live: list[Snapshot]):
    said = verdicts(live)
    assert {kind for _, onset, kind, _ in said if onset} >= {"pressure", "crash"}
    assert verdicts(read(b"".join(to_json(snapshot) + b"\n" for snapshot in live))) == said


def test_a_plain_log_says_so_too(live: list[Snapshot]):
    assert not any(snapshot.reports for snapshot in live)
    alarms = ("pressure", "crash", "leak", "orphan")

    def heard(said: Said) -> Said:
        return [each for each in said if each[2] in alarms]

    assert heard(verdicts(read("".join(as_csv(live))))) == heard(verdicts(live))
