"""The daemon's log shows each change of the audit."""

from __future__ import annotations

import logging
import sqlite3
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from gpumond.host.logs import JsonFormatter, TextFormatter
from gpumond.store.audit import verify
from gpumond.store.database import MIGRATIONS
from gpumond.store.store import Store, StoreLimits
from tests.helpers.opened_store import with_store
from tests.helpers.running import gpumond_here

ENTRIES = 5


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return a function that returns the lines which the store has logged."""
    caplog.set_level(logging.INFO)
    return lambda: [TextFormatter().format(record) for record in caplog.records]


async def fill(store: Store) -> None:
    for number in range(ENTRIES):
        await store.audit("token", "reload", {"number": number})
        await store.audit("uid:4711", "flush.request", {"number": number})


def execute(path: Path, statement: str) -> None:
    db = sqlite3.connect(path)
    db.executescript(statement)
    db.close()


def test_every_entry_is_logged_and_unchanged_over_restarts(path: Path, lines: Callable[[], list[str]]):
    for _ in range(2):
        with_store(path, fill)
    assert verify(path, lines()) == (4 * ENTRIES, [])


@pytest.mark.parametrize(
    ("tampering", "complaint"),
    [
        ("UPDATE audit SET detail = '{\"number\":7}' WHERE seq = 3", "entry 3 was changed"),
        ("UPDATE audit SET at = at + 1 WHERE seq = 3", "entry 3 was changed"),
        ("UPDATE audit SET actor = X'FF' WHERE seq = 4", "entry 4 was changed"),
        ("DELETE FROM audit WHERE seq = 4", "entry 4 is missing"),
        ("DELETE FROM audit WHERE seq <= 1", "entry 1 is missing"),
        ("DELETE FROM audit WHERE seq = 10; UPDATE sqlite_sequence SET seq = 9", "entry 10 is missing"),
    ],
)
def test_changed_and_removed_entries_are_reported(
    path: Path, lines: Callable[[], list[str]], tampering: str, complaint: str
):
    with_store(path, fill)
    execute(path, tampering)
    assert verify(path, lines()) == (2 * ENTRIES, [complaint])


def test_message_that_quotes_a_line_counts_for_nothing(path: Path, lines: Callable[[], list[str]]):
    with_store(path, fill)
    digest = "0" * 64
    for text in ("audit entries of everyone up to 99 were removed", f"audit entry 3 of token: reload, sha256 {digest}"):
        quoted = f"2026-11-26 10:00:00,000 INFO gpumond.store.audit: {text}"
        logging.getLogger("gpumond.store.store").info("the workload %s", quoted)
    execute(path, "DELETE FROM audit WHERE seq = 4")
    assert verify(path, lines()) == (2 * ENTRIES, ["entry 4 is missing"])


@pytest.mark.parametrize("prefix", ["", "Nov 26 10:00:00 node1 gpumond[7]: ", "2026-11-26T10:00:00.1Z stderr F "])
def test_lines_of_collectors_are_read(path: Path, caplog: pytest.LogCaptureFixture, prefix: str):
    caplog.set_level(logging.INFO)
    with_store(path, fill)
    for formatter in (TextFormatter(), JsonFormatter()):
        assert verify(path, [prefix + formatter.format(record) for record in caplog.records]) == (2 * ENTRIES, [])


def test_entries_with_the_numbers_of_removed_ones_are_reported(path: Path, lines: Callable[[], list[str]]):
    with_store(path, fill)
    execute(path, "DELETE FROM audit; DELETE FROM sqlite_sequence")
    with_store(path, fill)
    assert set(verify(path, lines())[1]) == {f"entry {number + 1} was changed" for number in range(2 * ENTRIES)}


def test_entries_beyond_the_limits_are_not_missed(path: Path, lines: Callable[[], list[str]]):
    async def fill_often(store: Store) -> None:
        for _ in range(10):
            await fill(store)

    with_store(path, fill_often, StoreLimits(max_audit_entries=20, max_audit_entries_of_user=10))
    assert verify(path, lines()) == (20 * ENTRIES, [])
    execute(path, "DELETE FROM audit WHERE seq = 95")
    assert verify(path, lines())[1] == ["entry 95 is missing"]


def test_audit_of_a_store_that_replaces_a_corrupt_one_is_verified(path: Path, lines: Callable[[], list[str]]):
    with_store(path, fill)
    path.write_bytes(b"x" * 10_000)
    with_store(path, fill)
    renamed = f"{2 * ENTRIES} logged entries were in a corrupt store, which was renamed"
    assert verify(path, lines()) == (2 * ENTRIES + 1, [renamed])


def test_entries_of_chains_are_kept(path: Path):
    path.parent.mkdir(mode=0o700)
    execute(
        path,
        "".join(MIGRATIONS[:11])
        + "PRAGMA user_version = 11;"
        + "INSERT INTO audit VALUES (7, 1.0, 'token', 'reload', '{}', '', '');"
        + "INSERT INTO audit VALUES (8, 3.0, 'uid:0', 'release', '{}', '', '');"
        + "INSERT INTO user_audit VALUES (1, 'uid:4711', 1, 2.0, 'uid:4711', 'flush.request', '{}', '', '');",
    )
    path.chmod(0o600)
    entries = with_store(path, lambda store: store.audit_entries())
    assert [(entry.seq, entry.at, entry.action) for entry in entries] == [
        (1, 1.0, "reload"),
        (2, 2.0, "flush.request"),
        (3, 3.0, "release"),
    ]
    assert len(with_store(path, lambda store: store.audit_entries(include_users=False))) == 2


def verified(path: Path, log: str) -> subprocess.CompletedProcess[str]:
    path.with_name("log").write_text(log)
    return gpumond_here("audit", "verify", "--state-dir", str(path.parent), "--log", str(path.with_name("log")))


def test_command_prints_a_sentence_for_each_problem(path: Path, lines: Callable[[], list[str]]):
    with_store(path, fill)
    log = "\n".join(lines())
    done = verified(path, log)
    assert (done.returncode, done.stdout) == (0, f"{path}: 10 logged entries are unchanged\n")
    none = verified(path, "")
    assert (none.returncode, none.stdout.endswith(" | gpumond audit verify\n")) == (
        3,
        True,
    )
    execute(path, "DELETE FROM audit WHERE seq > 8")
    done = verified(path, log)
    assert (done.returncode, done.stdout) == (1, f"{path}: entry 9 is missing\n{path}: entry 10 is missing\n")
    path.write_bytes(b"x" * 10_000)
    done = verified(path, log)
    assert (done.returncode, done.stdout.startswith(f"{path}: the audit log can't be read: "), done.stderr) == (
        1,
        True,
        "",
    )
