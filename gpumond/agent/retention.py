"""Search of the lines that keep memory: tensors that were created in one interval and still exist after the next.

Temporary tensors of a step do not survive an interval, and parameters are older than the search. The search has three
moments, between which it keeps weak references only.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from gpumond.model.program import Retainer
from gpumond.protocol.messages import clean

if TYPE_CHECKING:
    from gpumond.agent.referrers import Place

INTERVAL_SECONDS = 20.0
MAX_TENSORS = 50_000
"""Most tensors of a search; the oldest are left out."""
GROUPS, EACH = 8, 4
"""Number of groups of equal tensors, and of tensors of each, whose referrers are searched."""
MAX_OBJECTS = 32
"""Number of tensors with a graph whose referrers are searched."""
RETAINERS = 3
MAX_FILE, MAX_NAME = 160, 80


class Tracked(NamedTuple):
    """One tensor. ``size_bytes`` is that of its storage. ``has_graph``: it keeps the graph that computed it."""

    tensor: Any
    size_bytes: int
    has_graph: bool


class Total:
    """What one place keeps."""

    def __init__(self) -> None:
        self.size = self.tensors = 0
        self.has_graph = False


Read = Callable[[], Sequence[Tracked]]


class RetentionSearch:
    """``read`` returns all tensors on the devices."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._old = self._references()
        self._new: list[weakref.ref[Any]] | None = None

    def advance(self) -> tuple[Retainer, ...] | None:
        """Continue after an interval. Return the result the second time, largest first."""
        if self._new is None:
            old = {id(tensor) for reference in self._old if (tensor := reference()) is not None}
            self._new = [reference for reference in self._references() if id(reference()) not in old]
            self._old = []
            return None
        new = {id(tensor) for reference in self._new if (tensor := reference()) is not None}
        self._new = []
        kept, graphs = [], []
        for one in self._read()[:MAX_TENSORS]:
            if id(one.tensor) in new:
                kept.append(one)
            elif one.has_graph:
                graphs.append(one)
        return _retainers(kept, graphs)

    def _references(self) -> list[weakref.ref[Any]]:
        found = []
        for one in self._read()[:MAX_TENSORS]:
            try:
                found.append(weakref.ref(one.tensor))
            except TypeError:  # a subclass without weak references
                continue
        return found


def _places(objects: Sequence[Any]) -> list[Place | None]:
    from gpumond.agent import referrers  # few programs need it

    return referrers.places(objects)


def _retainers(kept: Sequence[Tracked], graphs: Sequence[Tracked]) -> tuple[Retainer, ...]:
    """Return the lines that keep most. ``graphs`` are other tensors that keep the graph that computed them."""
    groups: defaultdict[tuple[int, bool], list[Tracked]] = defaultdict(list)
    for one in kept:
        groups[one.size_bytes, one.has_graph].append(one)
    largest = sorted(groups.values(), key=lambda group: -(sum(one.size_bytes for one in group) + len(group)))[:GROUPS]
    samples = [(group, one) for group in largest for one in group[:EACH]]
    objects = [one.tensor for _, one in samples]
    totals: dict[Place, Total] = {}
    unheld = Total()
    for (group, _), place in zip(samples, _places(objects), strict=True):
        part = min(EACH, len(group))
        total = unheld if place is None else totals.setdefault(place, Total())
        total.size += sum(one.size_bytes for one in group) // part
        total.tensors += -(-len(group) // part)
        total.has_graph |= group[0].has_graph
    holders = [total for total in totals.values() if total.has_graph]
    if unheld.size and not holders:
        holders = _holders_of_graphs(graphs, totals)
    for total in holders:  # autograd refers to the others
        total.size += unheld.size // len(holders)
        total.tensors += unheld.tensors // len(holders)
    ordered = sorted(totals.items(), key=lambda entry: -entry[1].size)
    return tuple(_retainer(place, total.size, total.tensors) for place, total in ordered[:RETAINERS])


def _holders_of_graphs(graphs: Sequence[Tracked], totals: dict[Place, Total]) -> list[Total]:
    """Add the places of tensors from which the graph that keeps the others can be reached."""
    objects = [one.tensor for one in graphs[:MAX_OBJECTS]]
    found = {place for place in _places(objects) if place is not None}
    return [totals.setdefault(place, Total()) for place in found]


def _retainer(place: Place, size: int, tensors: int) -> Retainer:
    return Retainer(
        file=clean(place.file[-MAX_FILE:]),
        line=place.line,
        function=clean(place.function[-MAX_NAME:]),
        name=clean(place.name[-MAX_NAME:]),
        size_bytes=size,
        tensors=tensors,
    )
