"""The audit is a chain: every change to it is detected."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from gpumond.store.audit import GENESIS, append, verify_audit
from gpumond.store.database import STEPS
from gpumond.store.store import Bounds, Store, remove_excess
from tests.helpers.opened_store import with_store


def test_audit_can_be_verified_while_the_daemon_writes_it(path: Path):
    async def work(store: Store) -> list[str]:
        for number in range(5):
            await store.audit("token", "flush", {"pid": number})
        return verify_audit(path)

    assert with_store(path, work) == []


@pytest.mark.parametrize(
    ("tampering", "complaint"),
    [
        ("UPDATE audit SET detail = '{\"pid\":7}' WHERE seq = 3", "entry 3 was changed"),
        ("UPDATE audit SET at = at + 1 WHERE seq = 3", "entry 3 was changed"),
        ("DELETE FROM audit WHERE seq = 3", "entries 3 to 3 are missing"),
        ("DELETE FROM audit WHERE seq <= 2", "entries before 3 are missing"),
        ("DELETE FROM audit WHERE seq = 5", "entries 5 to 5 are missing at the end"),
        ("DELETE FROM audit", "entries 1 to 5 are missing at the end"),
    ],
)
def test_changes_of_entries_are_detected(path: Path, tampering: str, complaint: str):
    async def work(store: Store) -> None:
        for number in range(5):
            await store.audit("token", "flush", {"pid": number})

    with_store(path, work)
    db = sqlite3.connect(path)
    with db:
        db.execute(tampering)
    db.close()
    assert any(complaint in problem for problem in verify_audit(path)), verify_audit(path)


def instructions_of_an_entry(entries: int) -> int:
    """Return the number of instructions of SQLite, in hundreds, to add an entry to this number of entries within the
    bounds.
    """
    db = sqlite3.connect(":memory:")
    db.executescript("".join(STEPS))
    row = (1.0, "token", "reload", "{}", GENESIS, GENESIS)
    db.executemany(
        "INSERT INTO audit (at, actor, action, detail, prev_hash, hash) VALUES (?, ?, ?, ?, ?, ?)", [row] * entries
    )
    hundreds = 0

    def count() -> int:
        nonlocal hundreds
        hundreds += 1
        return 0

    db.set_progress_handler(count, 100)
    append(db, "token", "reload", {})
    remove_excess(db, Bounds())
    db.close()
    return hundreds


def test_cost_of_an_entry_does_not_depend_on_their_number():
    assert instructions_of_an_entry(20_000) <= instructions_of_an_entry(20) + 2
