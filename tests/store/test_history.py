"""The history over a restart: coarse, bounded, and without delay of a tick."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from gpumond.diagnosis.previous_runs import EarlierUse, EarlierUses
from gpumond.facts.errors import StoreUnavailable
from gpumond.facts.program import ProcessKey
from gpumond.store.store import HISTORY_INTERVAL_SECONDS, HistoryPersistence, Store
from gpumond.tick.history import CoarseSeries, History
from tests.helpers.values import make_snapshot

T = TypeVar("T")
PROCESS_SERIES = ("GPU-a", ProcessKey(10, 100))
HOURS = 3


def history(processes: int = 1) -> History:
    """Three hours of one device and some processes, a sample every 10 s."""
    made = History()
    for second in range(0, HOURS * 3600, 10):
        made.advance(make_snapshot(elapsed_seconds=float(second), taken_at=1e9 + second))
        made.device_series("GPU-a").add((float(second), 5.0, 4.0, 3.0, 0.0, 0.0, 0.5, 0.0, 1.0, 0.0))
        for number in range(processes):
            series = made.process_series(("GPU-a", ProcessKey(10 + number, 100)))
            assert series
            series.add((float(second), *[float(second)] * 5))
    return made


def with_store(path: Path, work: Callable[[Store], Awaitable[T]]) -> T:
    async def run() -> T:
        store = Store(path / "state" / "gpumond.db")
        await store.open()
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(run())


def quarters(history: History) -> list[tuple[float, ...]]:
    return [point[1:] for point in history.series(PROCESS_SERIES, "used", resolution=900)]


def test_history_of_existing_processes_is_restored_after_a_restart(tmp_path: Path):
    before, after = history(), History()

    async def keep(store: Store) -> None:
        await HistoryPersistence(store).close(before, EarlierUses())

    async def restore(store: Store) -> None:
        await HistoryPersistence(store).restore(after, EarlierUses())

    with_store(tmp_path, keep)
    with_store(tmp_path, restore)
    at = HOURS * 3600.0
    after.advance(make_snapshot(elapsed_seconds=1.0, taken_at=1e9 + at))
    after.process_series(("GPU-a", ProcessKey(10, 101)))
    assert quarters(after) == [], "that pid is another process now"
    after.process_series(PROCESS_SERIES)
    *ended, _ = quarters(before)  # the last block has not ended, and is not stored
    assert quarters(after) == ended != []
    assert after.processes[PROCESS_SERIES].started == pytest.approx(1.0 - at)


def test_history_is_stored_periodically_while_ticks_go_on(tmp_path: Path):
    stored = history(processes=16)

    async def work(store: Store) -> int:
        keeper = HistoryPersistence(store)
        keeper.advance(stored, EarlierUses(), HISTORY_INTERVAL_SECONDS - 1)
        await asyncio.sleep(0.05)
        assert not await store.history()
        keeper.advance(stored, EarlierUses(), HISTORY_INTERVAL_SECONDS)
        await asyncio.sleep(0)
        stored.end(PROCESS_SERIES)  # a process that ends meanwhile is left out
        while not await store.history():
            await asyncio.sleep(0)
        return len(await store.history())

    assert with_store(tmp_path, work) == 16


def test_stored_history_replaces_the_previous_one(tmp_path: Path):
    async def work(store: Store) -> list[CoarseSeries]:
        for processes in (5, 1):
            await store.store_history(tuple(history(processes).coarse_series()))
        return await store.history()

    assert len(with_store(tmp_path, work)) == 2


def test_unreadable_history_is_reported_and_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with_store(tmp_path, lambda store: store.store_history(tuple(history().coarse_series())))
    db = sqlite3.connect(tmp_path / "state" / "gpumond.db")
    with db:
        db.execute("UPDATE history SET body = '{\"blocks\": 7}'")
    db.close()
    with_store(tmp_path, lambda store: HistoryPersistence(store).restore(History(), EarlierUses()))
    assert "can't be read" in caplog.text


class Broken:
    async def store_history(self, history: object) -> None:
        raise StoreUnavailable("the disk is full")

    async def history(self) -> list[CoarseSeries]:
        raise StoreUnavailable("the disk is full")

    async def store_earlier_uses(self, earlier_uses: object) -> None:
        raise StoreUnavailable("the disk is full")

    async def earlier_uses(self) -> list[EarlierUse]:
        raise StoreUnavailable("the disk is full")


def test_history_works_without_a_store():
    async def work() -> None:
        keeper = HistoryPersistence(Broken())
        await keeper.restore(History(), EarlierUses())
        await keeper.close(history(), EarlierUses())

    asyncio.run(work())


def test_absent_processes_are_kept_for_the_next_restart(tmp_path: Path):
    async def work(store: Store) -> list[CoarseSeries]:
        await HistoryPersistence(store).close(history(), EarlierUses())
        early = History()
        await HistoryPersistence(store).restore(early, EarlierUses())
        await HistoryPersistence(store).close(early, EarlierUses())
        return await store.history()

    assert {(one.device_uuid, one.pid) for one in with_store(tmp_path, work)} == {("GPU-a", None), ("GPU-a", 10)}


def test_levels_of_earlier_lives_are_kept_over_a_restart(tmp_path: Path):
    before, after = EarlierUses(), EarlierUses()
    before.record(("train", 1000), 1e9, held=40e9)
    after.record(("serve", None), 2e9, returned=7e9)

    async def keep(store: Store) -> None:
        await HistoryPersistence(store).close(History(), before)

    async def restore(store: Store) -> None:
        await HistoryPersistence(store).restore(History(), after)

    with_store(tmp_path, keep)
    with_store(tmp_path, restore)
    assert {(past.name, past.uid, past.held_bytes, past.returned_bytes) for past in after.records()} == {
        ("train", 1000, 40e9, 0.0),
        ("serve", None, 0.0, 7e9),
    }
