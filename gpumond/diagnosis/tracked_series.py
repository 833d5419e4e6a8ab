"""One device or one process life, as it is followed: what was seen of it last, and what is concluded. Pure."""

from __future__ import annotations

from math import inf, nan

from gpumond.diagnosis.leak import Leak
from gpumond.diagnosis.peaks import Peaks
from gpumond.diagnosis.plateaus import Plateaus
from gpumond.history import LIVE, UNCLAIMED, USED
from gpumond.history.series import Series
from gpumond.model.frame import Verdict
from gpumond.model.program import Ending

Key = tuple[str, int | None, int | None]
"""(device UUID, pid, start_ticks); the device itself has neither."""


class TrackedSeries:
    """Times are of the History's clock."""

    __slots__ = (
        "born",
        "counted",
        "doubts",
        "ending",
        "leak",
        "levels",
        "life",
        "name",
        "peaks",
        "seen",
        "series",
        "used",
        "verdicts",
    )

    def __init__(self, life: Key, name: str, series: Series) -> None:
        self.life = life
        self.name = name
        self.series = series
        self.born = series.born
        self.seen = -inf
        self.used = nan
        """Bytes, by the signal that is trusted most."""
        self.counted = False
        """An agent reports of it."""
        self.ending: Ending | None = None
        """How the program ended, as its agent said."""
        self.peaks = Peaks(-inf)
        self.levels = Plateaus()
        self.leak: Leak | None = None
        self.doubts = 0
        """How many minutes in a row another shape was found than is said."""
        self.verdicts: dict[str, Verdict] = {}

    @property
    def uuid(self) -> str:
        return self.life[0]

    @property
    def pid(self) -> int | None:
        return self.life[1]

    @property
    def main(self) -> int:
        """The signal that is trusted most."""
        return UNCLAIMED if self.pid is None else LIVE if self.counted else USED

    def begin_again(self, now: float) -> None:
        """As if it were another life: all that was known of its course says nothing of what comes."""
        self.born = now
        self.leak = None
        self.levels = Plateaus()
