"""Time in logs: order, gaps, clock changes, and logs appended to logs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice

import pytest

from gpumond.diagnosis.diagnosis import Diagnosis, diagnose
from gpumond.facts.errors import ConfigError
from gpumond.facts.frame import Verdict
from gpumond.facts.messages import to_json
from gpumond.facts.snapshot import Snapshot
from gpumond.features.loadgen.plan import plan
from gpumond.features.recordings.diagnose import VerdictChanges
from gpumond.features.recordings.snapshots import UNKNOWN_PID
from tests.helpers.simulated_snapshots import snapshots as virtual
from tests.recordings.reading import elapsed, read, read_with_notices, used


def log(*times: float, uuid: str = "a") -> str:
    return "".join(f"{time},{uuid},,{number}\n" for number, time in enumerate(times))


def read_log(*times: float) -> tuple[list[Snapshot], list[str]]:
    return read_with_notices("time,uuid,pid,used_bytes\n" + log(*times))


def test_lines_out_of_order_are_sorted():
    snapshots, remarks = read_log(0, 1, 3, 2, 4)
    assert (elapsed(snapshots), used(snapshots, "a")) == ([0, 1, 2, 3, 4], [0, 1, 3, 2, 4])
    assert remarks == []


def test_gap_remains_a_gap():
    snapshots, _ = read_log(0, 1, 2, 2402, 2403)
    assert elapsed(snapshots) == [0, 1, 2, 2402, 2403]


def test_long_gap_remains_a_gap_if_the_series_continues():
    snapshots, remarks = read_log(0, 1, 100_000, 100_001)
    assert (elapsed(snapshots), remarks) == ([0, 1, 100_000, 100_001], [])


@pytest.mark.parametrize("restart", [(500, 501, 502), (0, 1, 2), (994, 995, 996)], ids=["clock", "appended", "near"])
def test_clock_set_back_begins_a_new_section_and_elapsed_time_continues(restart: tuple[float, ...]):
    snapshots, remarks = read_log(1000, 1001, 1002, *restart)
    assert elapsed(snapshots) == [0, 1, 2, 3, 4, 5]
    assert [snapshot.taken_at for snapshot in snapshots] == [1000, 1001, 1002, *restart]
    assert "line 5: the log's clock was set back" in remarks[0]


@pytest.mark.parametrize("stray", [10.0, 4e9], ids=["back", "ahead"])
def test_single_line_with_a_distant_time_is_skipped(stray: float):
    snapshots, remarks = read_log(1000, 1001, stray, 1002, 1003)
    assert elapsed(snapshots) == [0, 1, 2, 3]
    assert remarks == ["ignored: 1 line far out of order in time"]


def test_series_written_one_after_another_are_merged():
    snapshots = read("time,uuid,pid,used_bytes\n" + log(*range(100), uuid="a") + log(*range(100), uuid="b"))
    assert elapsed(snapshots) == [float(n) for n in range(200)]
    assert used(snapshots, "b") == list(range(100))


@pytest.mark.parametrize("times", [range(90_000, 0, -6), range(90, 0, -6)], ids=["long", "short"])
def test_reversed_log_is_refused_with_the_remedy(times: range):
    with pytest.raises(ConfigError, match="line 3: time decreases from this line on; sort the log by time"):
        read_log(*times)


def test_readings_a_moment_apart_are_one_snapshot_unless_of_the_same_device():
    rows = "".join(f"{30 * t},a,,{t}\n{30 * t + 9},b,,{t}\n" for t in range(10))
    snapshots = read("time,uuid,pid,used_bytes\n" + rows)
    assert [[d.used_bytes for d in s.devices] for s in snapshots[-5:]] == [[t, t] for t in range(5, 10)]


def test_device_missing_from_readings_is_missed_and_then_removed():
    rows = "".join(f"{t},a,,{t}\n" + (f"{t},b,,{t}\n" if t < 5 else "") for t in range(12))
    snapshots = read("time,uuid,pid,used_bytes\n" + rows)
    missed = [{d.uuid: d.missed_readings for d in s.devices}.get("b") for s in snapshots]
    assert missed == [0, 0, 0, 0, 0, 1, 2, None, None, None, None, None]


def test_snapshots_of_a_log_are_deterministic():
    rows = "time,uuid,pid,used_bytes\n" + log(*(t + (t * 7 % 5) for t in range(500)))
    assert read(rows) == read(rows)


def make_verdict(kind: str = "leak", pid: int | None = 7, summary: str = "") -> Verdict:
    return Verdict(
        device_uuid="GPU-a", pid=pid, start_ticks=None if pid is None else 100, kind=kind, since=0.0, summary=summary
    )


def transitions(changes: VerdictChanges, at: float, *verdicts: Verdict) -> list[tuple[float, bool, str, int | None]]:
    return [(c.at, c.onset, c.verdict.kind, c.verdict.pid) for c in changes.update(verdicts, at)]


def test_verdict_has_one_beginning_and_one_end():
    changes = VerdictChanges()
    assert transitions(changes, 1, make_verdict()) == [(1, True, "leak", 7)]
    assert transitions(changes, 2, make_verdict(summary="goes on")) == []
    assert transitions(changes, 3, make_verdict("pressure")) == [(3, False, "leak", 7), (3, True, "pressure", 7)]
    assert transitions(changes, 4, make_verdict("pressure"), make_verdict()) == [(4, True, "leak", 7)]


def test_verdicts_of_processes_and_devices_are_distinct():
    changes = VerdictChanges()
    assert transitions(changes, 1, make_verdict(pid=7), make_verdict(pid=8), make_verdict(pid=None)) == [
        (1, True, "leak", 7),
        (1, True, "leak", 8),
        (1, True, "leak", None),
    ]


def test_verdict_of_an_allocator_without_a_pid_is_its_devices_and_occurs_once():
    changes = VerdictChanges()
    own = make_verdict(pid=UNKNOWN_PID, summary=f"a program (pid {UNKNOWN_PID}) keeps more")
    (change,) = changes.update((own, make_verdict(pid=None)), 1)
    assert (change.verdict.pid, change.verdict.summary) == (None, "a program keeps more")


Transitions = list[tuple[float, bool, str, int | None]]


def verdicts(snapshots: Iterable[Snapshot]) -> Transitions:
    diagnosis, changes, transitions = Diagnosis(), VerdictChanges(), []
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
