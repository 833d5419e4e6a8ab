"""What the store acknowledged is kept; what it cannot keep it refuses, and says so."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from gpumond.audit import GENESIS, entry_hash
from gpumond.errors import NoSuchRule, RuleChanged, StoreUnavailable
from gpumond.model import Alert, Expected, Held, Receipt, StepResult
from gpumond.records import Heartbeat, to_text
from gpumond.store import Bounds, Store, verify_audit
from gpumond.store.database import STEPS
from gpumond.store.retention import same_clock

T = TypeVar("T")
RECEIPT = Receipt(
    10,
    "train",
    "GPU-a",
    "torch",
    "partial",
    "raced",
    Expected(1, 2, 3),
    -5,
    None,
    Held(9, 4, 5, None),
    Held(14, 4, 0, 20),
    (StepResult("cache", -5, 0.1, "x"),),
    True,
    "token",
    1.5,
    0.25,
)


def with_store(path: Path, work: Callable[[Store], Awaitable[T]], bounds: Bounds = Bounds(), **options: Any) -> T:
    async def run() -> T:
        store = Store(path, bounds, **options)
        await store.open()
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(run())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "gpumond.db"


def test_a_rule_is_there_after_a_restart_with_its_etag(path: Path):
    etag = with_store(path, lambda store: store.put_rule("full", {"above": 0.9}, "token"))
    assert with_store(path, lambda store: store.rules()) == {"full": (etag, {"above": 0.9})}


def test_only_this_user_can_read_it(path: Path):
    with_store(path, lambda store: store.audit("token", "reload", {}))
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()} == {0o600}


def test_a_change_of_another_version_than_the_one_meant_is_refused(path: Path):
    async def work(store: Store) -> None:
        etag = await store.put_rule("full", {"above": 0.9}, "token")
        newer = await store.put_rule("full", {"above": 0.8}, "token", if_match=etag)
        with pytest.raises(RuleChanged):
            await store.put_rule("full", {"above": 0.7}, "token", if_match=etag)
        with pytest.raises(RuleChanged):
            await store.delete_rule("full", "token", if_match=etag)
        await store.delete_rule("full", "token", if_match=newer)
        with pytest.raises(NoSuchRule):
            await store.delete_rule("full", "token")
        assert [entry.action for entry in await store.audit_entries()] == ["rule.create", "rule.replace", "rule.delete"]

    with_store(path, work)


def test_receipts_come_back_as_they_were(path: Path):
    with_store(path, lambda store: store.add_receipts([RECEIPT]))
    assert with_store(path, lambda store: store.receipts()) == [RECEIPT]


def test_the_audit_can_be_verified_beside_the_daemon_that_writes_it(path: Path):
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
def test_whatever_is_done_to_an_entry_shows(path: Path, tampering: str, complaint: str):
    async def work(store: Store) -> None:
        for number in range(5):
            await store.audit("token", "flush", {"pid": number})

    with_store(path, work)
    db = sqlite3.connect(path)
    with db:
        db.execute(tampering)
    db.close()
    assert any(complaint in problem for problem in verify_audit(path)), verify_audit(path)


def test_an_audit_that_was_trimmed_is_bounded_and_still_a_chain(path: Path):
    async def work(store: Store) -> int:
        for number in range(120):
            await store.audit("token", "flush", {"pid": number})
        return len(await store.audit_entries())

    assert with_store(path, work, Bounds(max_entries=40)) <= 41
    assert verify_audit(path) == []


def test_a_size_that_is_too_much_is_trimmed_too(path: Path):
    async def work(store: Store) -> None:
        for number in range(100):
            await store.audit("token", "flush", {"pid": number, "text": "x" * 5000})

    with_store(path, work, Bounds(max_bytes=300_000))
    assert path.stat().st_size < 600_000
    assert verify_audit(path) == []


DAY = 86400.0


def aged(path: Path, days: float) -> None:
    """As if all that is in the store had been written so many days earlier, and the audit made to fit."""
    db = sqlite3.connect(path)
    with db:
        for table in ("receipts", "past_alerts"):
            db.execute(f"UPDATE {table} SET at = ?", (time.time() - days * DAY,))
        before, rows = GENESIS, db.execute("SELECT seq, at, actor, action, detail FROM audit ORDER BY seq").fetchall()
        for seq, at, actor, action, detail in rows:
            own = entry_hash(before, seq, at - days * DAY, actor, action, json.loads(detail))
            db.execute(
                "UPDATE audit SET at = ?, prev_hash = ?, hash = ? WHERE seq = ?", (at - days * DAY, before, own, seq)
            )
            before = own
    db.close()
    assert verify_audit(path) == []


def over(name: str) -> Alert:
    return Alert("full", "resolved", (("alertname", name),), (), 1.0, 1.0, 2.0, time.time())


async def fill_everything(store: Store) -> None:
    await store.audit("token", "reload", {})
    await store.add_receipts([replace(RECEIPT, started_at=time.time())])
    await store.keep([], [], [over("a")])


async def contents(store: Store) -> tuple[list[str], int, int]:
    await store.trim()
    actions = [entry.action for entry in await store.audit_entries()]
    return actions, len(await store.receipts()), len(await store.past_alerts())


@pytest.mark.parametrize(
    ("days", "left"),
    [
        (1, (["reload"] * 4, 2, 2)),
        (10.2, (["reload"] * 4, 1, 1)),  # a trim is an entry too: not for every entry that is a little too old
        (11, (["reload", "reload", "trim"], 1, 1)),
    ],
)
def test_what_is_older_than_the_retention_goes_and_the_audit_is_still_a_chain(
    path: Path, days: float, left: tuple[list[str], int, int]
):
    async def fill_twice(store: Store) -> None:
        await fill_everything(store)
        await store.audit("token", "reload", {})

    with_store(path, fill_twice)
    aged(path, days)
    with_store(path, fill_twice)
    assert with_store(path, contents, Bounds(seconds=10 * DAY)) == left
    assert verify_audit(path) == []


def test_an_audit_that_is_old_as_a_whole_keeps_its_newest_entry_to_go_on_from(path: Path):
    with_store(path, fill_everything)
    with_store(path, fill_everything)
    aged(path, 1000)
    assert with_store(path, contents, Bounds(seconds=DAY)) == (["reload", "trim"], 0, 0)
    for _ in range(2):
        assert with_store(path, contents, Bounds(seconds=DAY)) == (["trim", "trim"], 0, 0)
    assert verify_audit(path) == []


def test_alerts_that_are_over_and_receipts_are_bounded_in_number(path: Path):
    async def work(store: Store) -> tuple[list[str], int, int]:
        for number in range(30):
            await store.keep([], [], [over(str(number))])
            await store.add_receipts([replace(RECEIPT, started_at=time.time())])
        return await contents(store)

    assert with_store(path, work, Bounds(max_receipts=10, max_past_alerts=20))[1:] == (10, 20)


@pytest.mark.parametrize(
    ("now", "same"), [((1600.0, 700.0), True), ((1600.0 + 3600, 700.0), False), ((1600.0 - 3e8, 700.0), False)]
)
def test_a_clock_that_was_set_does_not_tell_how_old_things_are(now: tuple[float, float], same: bool):
    assert same_clock(Heartbeat(1000.0, 100.0), Heartbeat(*now)) is same


def test_a_store_of_the_first_version_is_taken_over(path: Path):
    path.parent.mkdir(mode=0o700)
    db = sqlite3.connect(path)
    db.executescript(f"{STEPS[0]} PRAGMA user_version = 1;")
    with db:
        db.execute("INSERT INTO receipts (body) VALUES (?)", (to_text(RECEIPT),))
    db.close()

    async def work(store: Store) -> tuple[list[Receipt], list[Alert]]:
        await store.keep([], [], [over("a")])
        return await store.receipts(), await store.past_alerts()

    receipts, alerts = with_store(path, work)
    assert (receipts, [alert.labels for alert in alerts]) == ([RECEIPT], [over("a").labels])
    db = sqlite3.connect(path)
    assert db.execute("SELECT at FROM receipts").fetchall() == [(1.5,)]
    db.close()


def test_a_corrupt_file_is_set_aside_loudly_and_never_overwritten(path: Path, caplog: pytest.LogCaptureFixture):
    path.parent.mkdir(mode=0o700)
    path.write_bytes(b"not a database" * 1000)

    async def work(store: Store) -> tuple[bool, list[str], list[str]]:
        return store.writable, [fault.kind for fault in store.faults()], [e.action for e in await store.audit_entries()]

    assert with_store(path, work) == (True, ["corrupt"], ["store.set-aside"])
    (aside,) = path.parent.glob("*.corrupt-*")
    assert aside.read_bytes() == b"not a database" * 1000
    assert "set aside" in caplog.text
    assert with_store(path, work)[1] == ["corrupt"], "it is said until somebody has looked"


def test_a_page_that_went_bad_is_noticed_at_the_next_start(path: Path):
    async def fill(store: Store) -> None:
        for number in range(200):
            await store.put_rule(f"rule{number}", {"text": "x" * 500}, "token")

    with_store(path, fill)
    with path.open("r+b") as file:
        file.seek(4096 * 5)
        file.write(b"\xff" * 4096 * 20)
    assert with_store(path, _kinds) == ["corrupt"]


async def _kinds(store: Store) -> list[str]:
    return [fault.kind for fault in store.faults()]


def test_two_daemons_never_share_a_store(path: Path):
    async def work(store: Store) -> None:
        second = Store(path)
        await second.open()
        assert not second.writable
        assert "another daemon" in second.trouble
        with pytest.raises(StoreUnavailable):
            await second.audit("token", "reload", {})
        await second.close()
        await store.audit("token", "reload", {})

    with_store(path, work)


def test_a_directory_that_others_can_write_is_not_used(path: Path):
    path.parent.mkdir()
    path.parent.chmod(0o777)

    async def work(store: Store) -> tuple[bool, str]:
        return store.writable, store.trouble

    writable, trouble = with_store(path, work)
    assert not writable
    assert "--state-dir" in trouble


def test_a_store_of_a_newer_version_is_left_alone(path: Path):
    with_store(path, lambda store: store.audit("token", "reload", {}))
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 99")
    db.close()
    assert with_store(path, _kinds) == ["not_writable"]
    assert [file.name for file in path.parent.glob("*corrupt*")] == []


@contextmanager
def limited(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_cannot_be_written_is_refused_and_works_again_by_itself(path: Path):
    async def work(store: Store) -> None:
        await store.put_rule("kept", {}, "token")
        with limited(path.stat().st_size):
            with pytest.raises(StoreUnavailable):
                await store.put_rule("big", {"text": "x" * 1_000_000}, "token")
            assert not store.writable
            acknowledged = set(await store.rules())
        while not store.writable:
            await asyncio.sleep(0.01)
        assert set(await store.rules()) == acknowledged >= {"kept"}
        await store.put_rule("after", {}, "token")

    with_store(path, work, beat_seconds=0.02)
    assert verify_audit(path) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    if (
        not shutil.which("mount")
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "none", mount], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("needs the right to mount a tmpfs")
    yield mount
    subprocess.run(["umount", "-l", mount], check=True)


def fill(directory: Path) -> Path:
    ballast = directory / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError:
            pass
    return ballast


def test_a_full_disk_is_said_to_be_one_and_space_mends_it(small_disk: Path):
    async def work(store: Store) -> None:
        await store.put_rule("kept", {}, "token")
        ballast = fill(small_disk)
        with pytest.raises(StoreUnavailable) as refused:
            await store.put_rule("lost", {"text": "x" * 200_000}, "token")
        assert refused.value.full
        assert not store.writable
        ballast.unlink()
        while not store.writable:
            await asyncio.sleep(0.01)
        assert set(await store.rules()) == {"kept"}
        await store.put_rule("after", {}, "token")

    with_store(small_disk / "gpumond.db", work, beat_seconds=0.02)
    assert verify_audit(small_disk / "gpumond.db") == []


def test_a_store_that_cannot_be_opened_is_opened_once_it_can(tmp_path: Path):
    place = tmp_path / "place"
    place.write_text("a file where the directory should be")

    async def work(store: Store) -> None:
        assert not store.writable
        place.unlink()
        while not store.writable:
            await asyncio.sleep(0.01)
        await store.audit("token", "reload", {})

    with_store(place / "gpumond.db", work, beat_seconds=0.02)


WRITER = """
import asyncio, sys
from pathlib import Path
from gpumond.store import Store
async def main():
    store = Store(Path(sys.argv[1]))
    await store.open()
    number = 0
    while True:
        number += 1
        await store.put_rule(f"rule{number % 50}", {"number": number}, "token")
        print(number, flush=True)
asyncio.run(main())
"""


@pytest.mark.parametrize("after", [1, 7, 40, 111])
def test_nothing_acknowledged_is_lost_when_the_writer_is_killed(path: Path, after: int):
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True, env=os.environ
    )
    assert writer.stdout
    for _ in range(after):
        acknowledged = int(writer.stdout.readline())
    writer.kill()
    acknowledged = max([acknowledged, *(int(line) for line in writer.stdout if line.endswith("\n"))])
    writer.wait()
    writer.stdout.close()
    entries = with_store(path, lambda store: store.audit_entries(10_000))
    assert len(entries) >= acknowledged
    assert verify_audit(path) == []
