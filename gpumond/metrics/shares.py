"""Shares of a page's series by user: where there are too many, the user with most loses the excess. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from gpumond.metrics.family import Family, Row
from gpumond.model.cooperative import Steps
from gpumond.model.frame import Frame

Owner = Callable[[tuple[str, ...]], int | None]
"""The uid to which the series with these label values belongs; None if it is nobody's or several users'."""


class TooManySeries(Exception):
    """The frame has more series than a page may have."""


class Shares:
    """The series that each user may have on one page. ``dropped``: those that are beyond."""

    def __init__(self, owners: Mapping[str, Owner], left: Mapping[int | None, int], dropped: int) -> None:
        self._owners, self._left, self.dropped = owners, dict(left), dropped

    def cut(self, family: Family, rows: Iterable[Row]) -> list[Row]:
        """The rows without those that are beyond a share. Families come in the order of the catalogue."""
        owner, left = self._owners[family.name], self._left
        kept: list[Row] = []
        for row in rows:
            uid = owner(row[0])
            if left[uid] > 0:
                left[uid] -= 1
                kept.append(row)
        return kept


def sharing(families: Iterable[Family], frame: Frame, most: int) -> Steps[Shares]:
    """Counts the series of each user, and divides ``most`` among them."""
    pids = {str(report.pid): report.uid for report in frame.snapshot.reports}
    workloads: dict[str, int | None] = {}
    for report in frame.snapshot.reports:
        workloads[report.workload] = report.uid if workloads.get(report.workload, report.uid) == report.uid else None
    owners: dict[str, Owner] = {}
    counts: Counter[int | None] = Counter()
    for family in families:
        owner = owners[family.name] = _owner(family, pids, workloads)
        counts.update(owner(labels) for labels, value in family.rows(frame) if value is not None)
        yield
    left = divided(counts, most)
    return Shares(owners, left, counts.total() - sum(left.values()))


def divided(counts: Mapping[int | None, int], most: int) -> dict[int | None, int]:
    """Nobody's series first; of the rest each user has what he needs up to an equal share, and what others leave."""
    left: dict[int | None, int] = {None: min(counts.get(None, 0), most)}
    room = most - left[None]
    users = sorted((count, uid) for uid, count in counts.items() if uid is not None)
    for number, (count, uid) in enumerate(users):
        left[uid] = min(count, room // (len(users) - number))
        room -= left[uid]
    return left


def _owner(family: Family, pids: Mapping[str, int], workloads: Mapping[str, int | None]) -> Owner:
    for label, table in (("pid", pids), ("workload", workloads)):
        if label in family.labels:
            place = family.labels.index(label)
            return lambda labels, place=place, table=table: table.get(labels[place])  # type: ignore[misc]
    return lambda labels: None
