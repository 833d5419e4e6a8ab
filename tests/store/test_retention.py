"""The oldest rows are removed beyond the limits of age and size."""

from __future__ import annotations

import sqlite3
import time
from dataclasses import replace
from pathlib import Path

import pytest

from gpumond.facts.alerts import ClockTimes
from gpumond.store.store import Store, StoreLimits, is_same_clock
from tests.helpers.opened_store import RECEIPT, over, with_store

DAY = 86400.0


def test_audit_is_bounded(path: Path):
    async def work(store: Store) -> int:
        for number in range(120):
            await store.audit("token", "flush", {"pid": number})
        return len(await store.audit_entries())

    assert with_store(path, work, StoreLimits(max_audit_entries=40)) <= 41


def test_store_above_its_size_limit_is_trimmed(path: Path):
    async def work(store: Store) -> None:
        for number in range(100):
            await store.audit("token", "flush", {"pid": number, "text": "x" * 5000})

    with_store(path, work, StoreLimits(max_bytes=300_000))
    assert path.stat().st_size < 600_000


def aged(path: Path, days: float) -> None:
    """Make all rows of the store this number of days older."""
    db = sqlite3.connect(path)
    with db:
        for table in ("receipts", "past_alerts", "audit"):
            db.execute(f"UPDATE {table} SET at = ?", (time.time() - days * DAY,))
    db.close()


async def fill_everything(store: Store) -> None:
    await store.audit("token", "reload", {})
    await store.add_receipts([replace(RECEIPT, started_at=time.time())])
    await store.store_alerts([], [], [over("a")])


async def contents(store: Store) -> tuple[list[str], int, int]:
    await store.trim()
    actions = [entry.action for entry in await store.audit_entries()]
    return actions, len(await store.receipts()), len(await store.past_alerts())


@pytest.mark.parametrize(("days", "left"), [(9.9, (["reload"] * 2, 2, 2)), (10.1, (["reload"], 1, 1))])
def test_rows_older_than_the_retention_are_removed(path: Path, days: float, left: tuple[list[str], int, int]):
    with_store(path, fill_everything)
    aged(path, days)
    with_store(path, fill_everything)
    assert with_store(path, contents, StoreLimits(max_age_seconds=10 * DAY)) == left


def test_audit_without_entries_continues_their_numbers(path: Path):
    with_store(path, fill_everything)
    aged(path, 1000)
    assert with_store(path, contents, StoreLimits(max_age_seconds=DAY)) == ([], 0, 0)
    with_store(path, fill_everything)
    assert [entry.seq for entry in with_store(path, lambda store: store.audit_entries())] == [2]


def test_resolved_alerts_and_receipts_are_limited_in_number(path: Path):
    async def work(store: Store) -> tuple[list[str], int, int]:
        for number in range(30):
            await store.store_alerts([], [], [over(str(number))])
            await store.add_receipts([replace(RECEIPT, started_at=time.time())])
        return await contents(store)

    assert with_store(path, work, StoreLimits(max_receipts=10, max_past_alerts=20))[1:] == (10, 20)


@pytest.mark.parametrize(
    ("now", "same"), [((1600.0, 700.0), True), ((1600.0 + 3600, 700.0), False), ((1600.0 - 3e8, 700.0), False)]
)
def test_changed_clock_removes_no_rows(now: tuple[float, float], same: bool):
    assert is_same_clock(ClockTimes(1000.0, 100.0), ClockTimes(*now)) is same
