"""Fair shares of a page's series by user: above the limit, the user with the most series loses the excess.

Performs no I/O.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from gpumond.metrics.family import Family, Row
from gpumond.model.cooperative import Steps
from gpumond.model.frame import Frame

Owner = Callable[[tuple[str, ...]], int | None]
"""Function from label values to the uid that owns the series; None if there is no single owner."""


class TooManySeries(Exception):
    """Raised if a frame has more series than the limit of a page."""


class Shares:
    """Number of series that each user may have on one page; ``dropped`` counts the series above it."""

    def __init__(self, owners: Mapping[str, Owner], remaining: Mapping[int | None, int], dropped: int) -> None:
        self._owners, self._remaining, self.dropped = owners, dict(remaining), dropped

    def cut(self, family: Family, rows: Iterable[Row]) -> list[Row]:
        """Return the rows within their owners' shares. Call it for families in catalogue order."""
        owner, remaining = self._owners[family.name], self._remaining
        kept: list[Row] = []
        for row in rows:
            uid = owner(row[0])
            if remaining[uid] > 0:
                remaining[uid] -= 1
                kept.append(row)
        return kept


def sharing(families: Iterable[Family], frame: Frame, most: int) -> Steps[Shares]:
    """Count the series of each user and divide ``most`` among the users."""
    pids: dict[str, int | None] = {}
    workloads: dict[str, int | None] = {}
    for report in frame.snapshot.reports:
        for table, label in ((pids, str(report.pid)), (workloads, report.workload)):
            table[label] = report.uid if table.get(label, report.uid) == report.uid else None
    owners: dict[str, Owner] = {}
    counts: Counter[int | None] = Counter()
    for family in families:
        owner = owners[family.name] = _owner(family, pids, workloads)
        counts.update(owner(labels) for labels, value in family.rows(frame) if value is not None)
        yield
    remaining = divided(counts, most)
    return Shares(owners, remaining, counts.total() - sum(remaining.values()))


def divided(counts: Mapping[int | None, int], most: int) -> dict[int | None, int]:
    """Divide ``most`` by max-min fairness; series without an owner are served first."""
    remaining: dict[int | None, int] = {None: min(counts.get(None, 0), most)}
    room = most - remaining[None]
    users = sorted((count, uid) for uid, count in counts.items() if uid is not None)
    for number, (count, uid) in enumerate(users):
        remaining[uid] = min(count, room // (len(users) - number))
        room -= remaining[uid]
    return remaining


def _owner(family: Family, pids: Mapping[str, int | None], workloads: Mapping[str, int | None]) -> Owner:
    for label, table in (("pid", pids), ("workload", workloads)):
        if label in family.labels:
            position = family.labels.index(label)
            return lambda labels, position=position, table=table: table.get(labels[position])  # type: ignore[misc]
    return lambda labels: None
