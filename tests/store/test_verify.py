"""``gpumond audit verify`` prints sentences for any content of the file."""

from __future__ import annotations

import json
import sqlite3
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from gpumond.store.audit import GENESIS, entry_hash, verify_audit
from gpumond.store.store import Store
from tests.helpers.opened_store import with_store
from tests.helpers.running import gpumond_here

ENTRIES = 5


async def fill(store: Store) -> None:
    for number in range(ENTRIES):
        await store.audit("token", "reload", {"number": number})
        await store.audit("uid:4711", "flush.request", {"number": number})


def verify(path: Path) -> subprocess.CompletedProcess[str]:
    return gpumond_here("audit", "verify", "--state-dir", str(path.parent))


def execute(path: Path, *statements: str) -> None:
    db = sqlite3.connect(path)
    for statement in statements:
        db.executescript(statement)
    db.close()


def break_schema(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content.replace(b"CREATE TABLE rules", b"CREATE TABLE ru\xff\xfes"))


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: execute(path, "DROP TABLE audit"),
        lambda path: execute(path, "DROP TABLE user_audit"),
        lambda path: execute(path, "UPDATE audit SET detail = X'FF' WHERE seq = 2"),
        lambda path: execute(path, "UPDATE audit SET hash = X'FF' WHERE seq = 2"),
        lambda path: execute(path, "UPDATE audit SET at = X'FF' WHERE seq = 2"),
        lambda path: execute(path, "UPDATE audit SET action = 'trim', detail = '[]' WHERE seq = 5"),
        lambda path: execute(path, "UPDATE user_audit SET seq = X'FF' WHERE seq = 5"),
        lambda path: execute(path, "UPDATE audit SET detail = '" + "[" * 90_000 + "' WHERE seq = 2"),
        break_schema,
        lambda path: path.write_bytes(b"x" * 10_000),
        lambda path: path.unlink(),
    ],
    ids=range(11),
)
def test_damage_is_one_sentence_with_exit_code_1(path: Path, damage: Callable[[Path], object]):
    with_store(path, fill)
    damage(path)
    done = verify(path)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
    assert done.stdout.startswith(f"{path}: "), done.stdout


def test_newest_entries_removed_with_their_count_are_missed(path: Path):
    with_store(path, fill)
    execute(path, "DELETE FROM audit WHERE seq > 3", "UPDATE sqlite_sequence SET seq = 3 WHERE name = 'audit'")
    assert verify_audit(path) == ["entries 4 to 5 are missing at the end"]
    with_store(path, fill)  # the daemon's next start adds entries with the same numbers
    assert "entry 4 reports that entries were missing when a daemon started" in verify_audit(path)
    assert verify(path).returncode == 1


def test_audit_emptied_with_its_count_is_missed(path: Path):
    with_store(path, fill)
    execute(path, "DELETE FROM audit", "DELETE FROM user_audit", "DELETE FROM sqlite_sequence")
    assert verify_audit(path) == [
        "entries 1 to 5 are missing at the end",
        "chain uid:4711: entries 1 to 5 are missing",
    ]


def test_rewritten_audit_differs_from_the_recorded_one(path: Path):
    with_store(path, fill)
    db = sqlite3.connect(path)
    before = GENESIS
    with db:
        for seq in range(1, ENTRIES + 1):
            own = entry_hash(before, seq, 1.0, "token", "reload", {})
            db.execute(
                "UPDATE audit SET at = 1.0, detail = ?, prev_hash = ?, hash = ? WHERE seq = ?",
                (json.dumps({}), before, own, seq),
            )
            before = own
    db.close()
    assert verify_audit(path) == ["entry 5 isn't the one that was recorded in gpumond.db-audit"]


def test_store_without_the_record_of_its_end_is_valid(path: Path):
    with_store(path, fill)
    for content in (b"", b"{}\nnot its hash\n", b"\xff" * 100):
        path.with_name("gpumond.db-audit").write_bytes(content)
        assert verify_audit(path) == []
    path.with_name("gpumond.db-audit").unlink()
    assert (verify(path).returncode, verify(path).stdout) == (0, f"{path}: the audit log is intact\n")
