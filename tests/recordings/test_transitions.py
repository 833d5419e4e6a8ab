"""Onsets and ends of verdicts."""

from __future__ import annotations

from gpumond.facts.frame import Verdict
from gpumond.features.recordings.diagnose import Changes
from gpumond.features.recordings.snapshots import NAMELESS


def make_verdict(kind: str = "leak", pid: int | None = 7, summary: str = "") -> Verdict:
    return Verdict(
        device_uuid="GPU-a", pid=pid, start_ticks=None if pid is None else 100, kind=kind, since=0.0, summary=summary
    )


def transitions(changes: Changes, at: float, *verdicts: Verdict) -> list[tuple[float, bool, str, int | None]]:
    return [(c.at, c.onset, c.verdict.kind, c.verdict.pid) for c in changes.update(verdicts, at)]


def test_verdict_has_one_beginning_and_one_end():
    changes = Changes()
    assert transitions(changes, 1, make_verdict()) == [(1, True, "leak", 7)]
    assert transitions(changes, 2, make_verdict(summary="goes on")) == []
    assert transitions(changes, 3, make_verdict("pressure")) == [(3, False, "leak", 7), (3, True, "pressure", 7)]
    assert transitions(changes, 4, make_verdict("pressure"), make_verdict()) == [(4, True, "leak", 7)]


def test_verdicts_of_processes_and_devices_are_distinct():
    changes = Changes()
    assert transitions(changes, 1, make_verdict(pid=7), make_verdict(pid=8), make_verdict(pid=None)) == [
        (1, True, "leak", 7),
        (1, True, "leak", 8),
        (1, True, "leak", None),
    ]


def test_verdict_of_an_allocator_without_a_pid_is_its_devices_and_occurs_once():
    changes = Changes()
    own = make_verdict(pid=NAMELESS, summary=f"a program (pid {NAMELESS}) keeps more")
    (change,) = changes.update((own, make_verdict(pid=None)), 1)
    assert (change.verdict.pid, change.verdict.summary) == (None, "a program keeps more")
