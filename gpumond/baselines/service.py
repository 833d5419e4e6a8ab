"""Stored baselines, and recordings in progress."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Literal, Protocol

from gpumond.baselines.recorder import BaselineRecorder
from gpumond.baselines.statistics import Baseline, Comparison, compare
from gpumond.errors import NoSuchBaseline, StoreUnavailable, TooManyBaselines
from gpumond.model.frame import Frame
from gpumond.model.pools import Receipt

Side = Literal["before", "after"]


class BaselineStore(Protocol):
    """Methods of the store that are used; each raises StoreUnavailable."""

    async def audit(self, actor: str, action: str, detail: object) -> None: ...
    async def baselines_have_room(self) -> bool: ...
    async def put_baseline(self, side: Side, baseline: Baseline) -> None: ...
    async def baselines(self, side: Side, name: str | None = None) -> list[Baseline]: ...
    async def delete_baseline(self, name: str, actor: str) -> bool: ...


class BaselineService:
    """One recording at a time for each name and side. A recording in progress is lost when the daemon ends."""

    def __init__(self, store: BaselineStore) -> None:
        self._store = store
        self._under_way: dict[tuple[str, Side], BaselineRecorder] = {}
        self._saving: asyncio.Task[None] | None = None

    def add(self, frame: Frame) -> None:
        """Add the frame of a tick; never blocks."""
        for measuring in self._under_way.values():
            if not measuring.complete:
                measuring.add(frame)
        if any(each.complete for each in self._under_way.values()) and (self._saving is None or self._saving.done()):
            self._saving = asyncio.ensure_future(self._save_quietly())

    async def close(self) -> None:
        """Wait for the baseline that is being written, if any."""
        if self._saving is not None:
            await self._saving

    def flushed(self, receipt: Receipt) -> None:
        for measuring in self._under_way.values():
            if not measuring.complete:
                measuring.flushed(receipt)

    async def record(self, name: str, for_seconds: float, workload: str | None, by: str) -> None:
        """Record a baseline; one of that name is replaced at the end. Raises StoreUnavailable, TooManyBaselines."""
        if not await self._store.baselines_have_room():
            raise TooManyBaselines("there are too many baselines; delete one that is no longer needed")
        detail = {"name": name, "for_seconds": for_seconds, "workload": workload}
        await self._store.audit(by, "baseline.record", detail)
        self._under_way[name, "before"] = BaselineRecorder(name, for_seconds, workload)

    async def measure_again(self, name: str, for_seconds: float, by: str) -> None:
        """Record the side that ``comparison`` compares with. Raises NoSuchBaseline, StoreUnavailable."""
        before = await self._kept("before", name)
        await self._store.audit(by, "baseline.compare", {"name": name, "for_seconds": for_seconds})
        self._under_way[name, "after"] = BaselineRecorder(name, for_seconds, before.workload)

    async def all(self) -> list[Baseline]:
        """Return all baselines; those in progress are not complete."""
        kept = {each.name: each for each in await self._store.baselines("before")}
        under_way = {name: _unsaved(each) for (name, side), each in self._under_way.items() if side == "before"}
        return [baseline for _, baseline in sorted((kept | under_way).items())]

    async def get(self, name: str) -> Baseline:
        """Return a baseline. Raises NoSuchBaseline."""
        measuring = self._under_way.get((name, "before"))
        return _unsaved(measuring) if measuring else await self._kept("before", name)

    async def comparison(self, name: str, other: str | None = None) -> Comparison:
        """Compare with another baseline, or with the last or the present second recording. Raises NoSuchBaseline."""
        before = await self._kept("before", name)
        if other is not None:
            return compare(before, await self._kept("before", other))
        measuring = self._under_way.get((name, "after"))
        return compare(before, _unsaved(measuring) if measuring else await self._kept("after", name))

    async def delete(self, name: str, by: str) -> None:
        """Delete a baseline. Raises NoSuchBaseline."""
        stopped = [self._under_way.pop((name, side), None) for side in _SIDES]
        if not await self._store.delete_baseline(name, by) and not any(stopped):
            raise _none("before", name)

    async def _kept(self, side: Side, name: str) -> Baseline:
        found = await self._store.baselines(side, name)
        if not found:
            raise _none(side, name)
        return found[0]

    async def _save_quietly(self) -> None:
        try:
            await self._save()
        except StoreUnavailable:
            pass  # the store has logged it; the next tick tries again

    async def _save(self) -> None:
        for (name, side), measuring in list(self._under_way.items()):
            if measuring.complete:
                await self._store.put_baseline(side, measuring.baseline())
                now = self._under_way.get((name, side))
                if now is measuring:
                    del self._under_way[name, side]
                elif now is None:  # it was deleted meanwhile
                    await self._store.delete_baseline(name, "gpumond")


_SIDES: tuple[Side, Side] = ("before", "after")


def _unsaved(measuring: BaselineRecorder) -> Baseline:
    """Return a recording in progress; it is complete once it is stored."""
    baseline = measuring.baseline()
    return replace(baseline, complete=False) if baseline.complete else baseline


def _none(side: Side, name: str) -> NoSuchBaseline:
    if side == "before":
        return NoSuchBaseline(f"there is no baseline {name}; record one with: gpumond baseline record {name} --for 10m")
    return NoSuchBaseline(
        f"there is no measurement to compare {name} with; start one with: gpumond baseline compare {name} --for 10m"
    )
