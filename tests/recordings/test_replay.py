"""Verdicts from a recording, or from a log of the same data, equal those of the running daemon."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice

import pytest

from gpumond.diagnosis.diagnosis import Diagnosis, diagnose
from gpumond.facts.messages import to_json
from gpumond.facts.snapshot import Snapshot
from gpumond.features.loadgen.plan import plan
from gpumond.features.recordings.diagnose import Changes
from tests.helpers.simulated_snapshots import snapshots as virtual
from tests.recordings.reading import read

Transitions = list[tuple[float, bool, str, int | None]]


def verdicts(snapshots: Iterable[Snapshot]) -> Transitions:
    diagnosis, changes, transitions = Diagnosis(), Changes(), []
    for snapshot in snapshots:
        diagnosis = diagnose(diagnosis, snapshot)
        for change in changes.update(diagnosis.verdicts, snapshot.taken_at):
            transitions.append((change.at, change.onset, change.verdict.kind, change.verdict.pid))
    return transitions


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
    """Snapshots of a program that fills its device and crashes, on a daemon that has just started."""
    snapshots_so_far = list(islice(virtual(plan("crash", seed=1)), 1200))
    start = snapshots_so_far[0].elapsed_seconds
    return [replace(snapshot, elapsed_seconds=snapshot.elapsed_seconds - start) for snapshot in snapshots_so_far]


def test_replay_gives_the_live_verdicts(live: list[Snapshot]):
    transitions = verdicts(live)
    assert {kind for _, onset, kind, _ in transitions if onset} >= {"pressure", "crash"}
    assert verdicts(read(b"".join(to_json(snapshot) + b"\n" for snapshot in live))) == transitions


def test_plain_log_gives_the_live_alarms(live: list[Snapshot]):
    assert not any(snapshot.reports for snapshot in live)
    alarms = ("pressure", "crash", "leak", "orphan")

    def alarms_of(transitions: Transitions) -> Transitions:
        return [each for each in transitions if each[2] in alarms]

    assert alarms_of(verdicts(read("".join(as_csv(live))))) == alarms_of(verdicts(live))
