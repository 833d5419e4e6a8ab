"""Verdicts on the memory curves of devices and processes, from one snapshot after another. No I/O.

Covers the development of memory over time. Every device and process has at most one *shape* (warm-up, steady, churn,
periodic, step-change) and the alarms that apply (leak, fragmentation, pressure, orphan, idle-holder, crash,
crash-loop); release means that a process ended in order. A leak replaces the shape.

Does not cover levels and counters as such (rules) and the owners of memory (the ledger).
"""

from __future__ import annotations

from gpumond.diagnosis.classifier import Classifier
from gpumond.facts.frame import Verdict
from gpumond.facts.snapshot import Snapshot
from gpumond.tick.history import History

__all__ = ["Diagnosis", "diagnose"]


class Diagnosis:
    """Diagnosis so far, and the active verdicts.

    ``pace``: seconds of this clock for one second of the snapshots; slopes and times in verdicts are in real
    seconds. ``diagnose`` changes the diagnosis that it is given, so that no old one is used.
    """

    __slots__ = ("classifier", "verdicts")

    def __init__(self, pace: float = 1.0) -> None:
        self.classifier = Classifier(pace)
        self.verdicts: tuple[Verdict, ...] = ()

    @property
    def history(self) -> History:
        return self.classifier.history


def diagnose(before: Diagnosis, snapshot: Snapshot) -> Diagnosis:
    """Return the diagnosis after ``snapshot``: a function of the sequence of snapshots alone.

    Durations are those of ``elapsed_seconds``; a snapshot that is not newer than the last one changes nothing.
    """
    if before.classifier.add(snapshot):
        before.verdicts = before.classifier.verdicts()
    return before
