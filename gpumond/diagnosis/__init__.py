"""What the curves mean: verdicts on devices and process lives, from one snapshot after another. Pure.

Covers: the course of memory over time. Every device and life has at most one *shape* (warm-up, steady, churn,
periodic, step-change) and the alarms that apply (leak, fragmentation, pressure, orphan, idle-holder, crash,
crash-loop); release says that a life ended in order. A leak stands in place of a shape.

Does not cover: levels and counters as such, which are for rules; who holds what, which is the ledger's.
"""

from __future__ import annotations

from gpumond.diagnosis.classifier import Classifier
from gpumond.history import History
from gpumond.model.cooperative import Steps, synchronous
from gpumond.model.frame import Verdict
from gpumond.model.snapshot import Snapshot

__all__ = ["Diagnosis", "diagnose", "diagnosing"]


class Diagnosis:
    """What is known so far, and the verdicts that hold now.

    ``pace``: one second of the snapshots counts as so many; slopes and times that come out are real ones again. A
    diagnosis is handed on: ``diagnose`` changes the one that it is given, so that nobody keeps an old one.
    """

    __slots__ = ("judge", "verdicts")

    def __init__(self, pace: float = 1.0) -> None:
        self.judge = Classifier(pace)
        self.verdicts: tuple[Verdict, ...] = ()

    @property
    def history(self) -> History:
        return self.judge.history


def diagnosing(before: Diagnosis, snapshot: Snapshot) -> Steps[Diagnosis]:
    """The diagnosis after ``snapshot``: a function of the sequence of snapshots alone.

    Durations are those of ``elapsed_seconds``; a snapshot that is not newer than the last one changes nothing.
    Between two stretches ``before`` is nobody else's, but its history may be read.
    """
    if (yield from before.judge.taking(snapshot)):
        before.verdicts = before.judge.verdicts()
    return before


diagnose = synchronous(diagnosing)
