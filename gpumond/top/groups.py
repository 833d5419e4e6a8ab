"""Rows of the table of processes: single ones, groups with sums, and trees of parents and children. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gpumond.model.process import ProcessKey
from gpumond.top.rows import HOLDINGS, ProcessLife, ProcessRow

GROUPINGS: Mapping[str, Callable[[ProcessRow], str]] = {
    "user": lambda row: row.user or "unknown user",
    "workload": lambda row: row.program,
    "container": lambda row: row.container or "no container",
}


@dataclass(frozen=True, slots=True)
class TableRow:
    """One row. ``process`` contains the sums of the ``members`` of a group; other rows have no members.

    ``depth`` is the number of ancestors that have a row.
    """

    process: ProcessRow
    depth: int = 0
    members: tuple[ProcessRow, ...] = ()

    @property
    def key(self) -> ProcessLife:
        return self.process.key

    @property
    def processes(self) -> tuple[ProcessRow, ...]:
        return self.members or (self.process,)


@dataclass(frozen=True, slots=True)
class Ancestor:
    """A process on this machine that is not in the table."""

    pid: int
    name: str


Lineage = Mapping[ProcessKey, Sequence[Ancestor]]
"""The ancestors of each process, its parent first; empty where they are unknown."""


def single(rows: Iterable[ProcessRow]) -> list[TableRow]:
    return [TableRow(row) for row in rows]


def grouped(rows: Iterable[ProcessRow], by: str) -> list[TableRow]:
    """Return a row for each group. ``by`` is a key of ``GROUPINGS``."""
    groups: dict[str, list[ProcessRow]] = {}
    for row in rows:
        groups.setdefault(GROUPINGS[by](row), []).append(row)
    return [
        TableRow(_sum(f"{by} {name}", f"{name} ({len(members)})", members), 0, tuple(members))
        for name, members in groups.items()
    ]


def _sum(key: str, name: str, members: Sequence[ProcessRow]) -> ProcessRow:
    """Return one row for several processes. The sum of values that are all unknown is unknown."""
    first = members[0]
    notable = [row for row in members if row.notable]
    verdicts = {row.verdict for row in notable or members if row.verdict}
    return replace(
        first,
        key=(key, ProcessKey(0, None)),
        gpu=_common((row.gpu for row in members), "*"),
        pid=0,
        program=name,
        user=_common((row.user for row in members), ""),
        container=_common((row.container for row in members), ""),
        busy_ratio=_total(row.busy_ratio for row in members),
        used_bytes=_total_bytes(row.used_bytes for row in members),
        shares={share: _total_bytes(row.shares[share] for row in members) for share in HOLDINGS},
        verdict=_common(verdicts, f"{len(notable)} problems" if notable else ""),
        notable=bool(notable),
        state="",
    )


def _common(values: Iterable[str], otherwise: str) -> str:
    found = set(values)
    return found.pop() if len(found) == 1 else otherwise


def _total(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _total_bytes(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def tree(rows: Sequence[ProcessRow], lineage: Lineage) -> list[TableRow]:
    """Return the rows with children below their parents. Siblings keep their order.

    A parent without memory on a device has a row if it has several children in the table.
    """
    by_pid: dict[int, ProcessRow] = {}
    for row in rows:
        if lineage.get(row.key[1]):
            by_pid.setdefault(row.pid, row)
    children: dict[int, list[ProcessRow]] = {}
    names: dict[int, str] = {}
    for row in rows:
        parent = _parent(row, lineage, by_pid)
        if parent is not None:
            children.setdefault(parent.pid, []).append(row)
            names[parent.pid] = parent.name
    headed = {pid for pid, own in children.items() if pid in by_pid or len(own) > 1}
    return list(_walk(rows, children, by_pid, headed, names))


def _parent(row: ProcessRow, lineage: Lineage, by_pid: Mapping[int, ProcessRow]) -> Ancestor | None:
    """Return the nearest ancestor in the table, else the parent."""
    ancestors = lineage.get(row.key[1], ())
    known = next((each for each in ancestors if each.pid in by_pid), None)
    return known or next((each for each in ancestors if each.pid > 1), None)


def _walk(
    rows: Sequence[ProcessRow],
    children: Mapping[int, Sequence[ProcessRow]],
    by_pid: Mapping[int, ProcessRow],
    headed: Collection[int],
    names: Mapping[int, str],
) -> Iterator[TableRow]:
    parent_of = {row.key: pid for pid in headed for row in children[pid]}
    done: set[int] = set()

    def below(row: ProcessRow, depth: int) -> Iterator[TableRow]:
        yield TableRow(row, depth)
        if by_pid.get(row.pid) is row and row.pid in headed:
            for child in children[row.pid]:
                yield from below(child, depth + 1)

    for row in rows:
        parent = parent_of.get(row.key)
        if parent is None:
            yield from below(row, 0)
        elif parent not in by_pid and parent not in done:
            done.add(parent)
            own = children[parent]
            head = replace(_sum(f"parent {parent}", names[parent], own), pid=parent)
            yield TableRow(head, 0, tuple(own))
            for child in own:
                yield from below(child, 1)
