"""Onsets and ends of verdicts."""

from __future__ import annotations

from gpumond.importers.builder import NAMELESS
from gpumond.importers.transitions import Changes
from gpumond.model.frame import Verdict


def a_verdict(kind: str = "leak", pid: int | None = 7, summary: str = "") -> Verdict:
    return Verdict(device_uuid="GPU-a", pid=pid, kind=kind, since=0.0, summary=summary)


def told(changes: Changes, at: float, *verdicts: Verdict) -> list[tuple[float, bool, str, int | None]]:
    return [(c.at, c.onset, c.verdict.kind, c.verdict.pid) for c in changes.update(verdicts, at)]


def test_a_verdict_begins_once_and_ends_once():
    changes = Changes()
    assert told(changes, 1, a_verdict()) == [(1, True, "leak", 7)]
    assert told(changes, 2, a_verdict(summary="goes on")) == []
    assert told(changes, 3, a_verdict("pressure")) == [(3, False, "leak", 7), (3, True, "pressure", 7)]
    assert told(changes, 4, a_verdict("pressure"), a_verdict()) == [(4, True, "leak", 7)]


def test_processes_and_devices_are_apart():
    changes = Changes()
    assert told(changes, 1, a_verdict(pid=7), a_verdict(pid=8), a_verdict(pid=None)) == [
        (1, True, "leak", 7),
        (1, True, "leak", 8),
        (1, True, "leak", None),
    ]


def test_an_allocator_without_a_pid_is_told_of_its_device_and_once():
    changes = Changes()
    own = a_verdict(pid=NAMELESS, summary=f"a program (pid {NAMELESS}) keeps more")
    (change,) = changes.update((own, a_verdict(pid=None)), 1)
    assert (change.verdict.pid, change.verdict.summary) == (None, "a program keeps more")
