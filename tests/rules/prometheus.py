"""Oracle of the states of a Prometheus alert, from its documentation and `rules/alerting.go`.

It uses nothing of gpumond. Times are seconds; an evaluation has or has not a result of the expression.
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple


class Oracle:
    def __init__(self, hold: float, keep: float) -> None:
        self.hold, self.keep = hold, keep
        self.state = "inactive"
        self.active_at = 0.0
        self.keep_since: float | None = None

    def evaluate(self, at: float, result: bool) -> str:
        """Return the state after one evaluation."""
        if result:
            if self.state == "inactive":
                self.state, self.active_at = "pending", at
            self.keep_since = None
        elif self.state == "pending":
            self.state = "inactive"
        elif self.state == "firing":
            if self.keep_since is None:
                self.keep_since = at
            if at - self.keep_since >= self.keep:
                self.state = "inactive"
        if self.state == "pending" and at - self.active_at >= self.hold:
            self.state = "firing"
            self.keep_since = None
        return self.state


UNKNOWN, GONE = "unknown", "gone"
Value = float | str


class Series(NamedTuple):
    """Values at evaluations, for a rule `> 0.5`."""

    hold: float
    keep: float
    times: tuple[float, ...]
    values: tuple[Value, ...]


def random_series(rng: Random, evaluations: int = 40, regular: bool = False) -> Series:
    """Create runs above and below the threshold, of random length, with gaps; evaluations are late or missed."""
    step = 60.0 if regular else rng.choice((1.0, 15.0, 60.0))
    kinds = () if regular else (GONE, UNKNOWN)
    values: list[Value] = []
    times: list[float] = []
    at = 0.0
    while len(values) < evaluations:
        kind = rng.choice(("high", "low", "high", "low", *kinds))
        for _ in range(rng.choice((1, 1, 2, 3, 5, 8))):
            values.append({"high": rng.choice((0.6, 0.9)), "low": rng.choice((0.5, 0.1))}.get(kind, kind))
    for _ in values[:evaluations]:
        times.append(at)
        at += step * (1 if regular else rng.choice((1, 1, 1, 1, 1.07, 3, 20)))
    hold, keep = (step * rng.choice((0, 0, 1, 2, 3, 7)) for _ in range(2))
    return Series(hold, keep, tuple(times), tuple(values[:evaluations]))
