"""State of one tracked device or process: last values, leak, levels and verdicts. No I/O."""

from __future__ import annotations

from math import inf, nan

from gpumond.diagnosis.detectors import LiveAllocations
from gpumond.diagnosis.growth import Growth, StepRecord
from gpumond.diagnosis.leak import Leak
from gpumond.diagnosis.peaks import Peaks
from gpumond.diagnosis.serving import UpperQuartiles
from gpumond.diagnosis.shapes import Plateaus
from gpumond.facts.frame import Fit, Verdict
from gpumond.facts.process import ProcessKey
from gpumond.facts.program import Ending
from gpumond.facts.verdicts import VerdictName
from gpumond.tick.history import LIVE, UNCLAIMED, USED, Series, SeriesKey

Evidence = tuple[tuple[str, float], ...]


class TrackedSeries:
    """One tracked device or process. Times are those of the History's clock."""

    __slots__ = (
        "allocations",
        "born",
        "counted",
        "disagreements",
        "ending",
        "growth",
        "key",
        "leak",
        "levels",
        "name",
        "peaks",
        "quartiles",
        "sampled_at",
        "series",
        "steps",
        "used",
        "verdicts",
    )

    def __init__(self, key: SeriesKey, name: str, series: Series) -> None:
        self.key = key
        self.name = name
        self.series = series
        self.born = series.born
        self.sampled_at = -inf
        self.used = nan
        """Bytes of the most reliable signal."""
        self.counted = False
        """True if an agent reports its pools."""
        self.ending: Ending | None = None
        """Ending of the program that its agent reported."""
        self.peaks = Peaks(-inf)
        self.levels = Plateaus()
        self.quartiles = UpperQuartiles()
        self.leak: Leak | None = None
        self.growth: Growth | None = None
        self.steps = StepRecord()
        self.allocations = LiveAllocations()
        self.disagreements = 0
        """Number of consecutive minutes with a shape other than the active one."""
        self.verdicts: dict[str, Verdict] = {}

    @property
    def uuid(self) -> str:
        return self.key[0]

    @property
    def process(self) -> ProcessKey | None:
        return self.key[1]

    @property
    def pid(self) -> int | None:
        return self.key[1].pid if self.key[1] else None

    @property
    def main(self) -> int:
        """Index of the most reliable signal."""
        return UNCLAIMED if self.process is None else LIVE if self.counted else USED

    def restart(self, now: float) -> None:
        """Discard the earlier curve, as for another process."""
        self.born = now
        self.leak = None
        self.growth = None
        self.steps = StepRecord()
        self.allocations = LiveAllocations()
        self.levels = Plateaus()
        self.quartiles = UpperQuartiles()

    def verdict(
        self,
        kind: VerdictName,
        since: float,
        evidence: Evidence,
        summary: str,
        time_to_oom_seconds: float | None = None,
        form: str = "",
        fit: Fit | None = None,
    ) -> Verdict:
        """Make a verdict on this device or process."""
        return Verdict(
            device_uuid=self.uuid,
            pid=self.pid,
            start_ticks=self.key[1].start_ticks if self.key[1] else None,
            kind=kind,
            since=since,
            evidence=evidence,
            time_to_oom_seconds=time_to_oom_seconds,
            summary=summary,
            form=form,
            fit=fit,
        )
