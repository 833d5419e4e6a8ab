"""Changes that the store cannot keep are refused with a reason, and it recovers by itself."""

from __future__ import annotations

import asyncio
import resource
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpumond.facts.errors import StoreUnavailable
from gpumond.features.rules.registry import rule_table
from gpumond.store.store import Store
from tests.helpers.opened_store import with_store


def test_corrupt_file_is_set_aside_with_a_fault_and_never_overwritten(path: Path, caplog: pytest.LogCaptureFixture):
    path.parent.mkdir(mode=0o700)
    path.write_bytes(b"not a database" * 1000)

    async def work(store: Store) -> tuple[bool, list[str], list[str]]:
        return store.writable, [fault.kind for fault in store.faults()], [e.action for e in await store.audit_entries()]

    assert with_store(path, work) == (True, ["corrupt"], ["store.set-aside"])
    (aside,) = path.parent.glob("*.corrupt-*")
    assert aside.read_bytes() == b"not a database" * 1000
    assert "renamed to" in caplog.text
    assert with_store(path, work)[1] == ["corrupt"], "the fault lasts until it is read"


def test_damaged_page_is_detected_at_the_next_start(path: Path):
    async def fill(store: Store) -> None:
        for number in range(200):
            await rule_table(store).put(f"rule{number}", {"text": "x" * 500}, "token")

    with_store(path, fill)
    with path.open("r+b") as file:
        file.seek(4096 * 5)
        file.write(b"\xff" * 4096 * 20)
    assert with_store(path, _kinds) == ["corrupt"]


async def _kinds(store: Store) -> list[str]:
    return [fault.kind for fault in store.faults()]


def test_second_daemon_does_not_share_the_store(path: Path):
    async def work(store: Store) -> None:
        second = Store(path)
        await second.open()
        assert not second.writable
        assert "another daemon" in second.problem
        with pytest.raises(StoreUnavailable):
            await second.audit("token", "reload", {})
        await second.close()
        await store.audit("token", "reload", {})

    with_store(path, work)


def test_directory_writable_by_others_is_not_used(path: Path):
    path.parent.mkdir()
    path.parent.chmod(0o777)

    async def work(store: Store) -> tuple[bool, str]:
        return store.writable, store.problem

    writable, trouble = with_store(path, work)
    assert not writable
    assert "--state-dir" in trouble


def test_store_of_a_newer_version_is_unchanged(path: Path):
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


def test_unwritable_changes_are_refused_until_the_store_recovers(path: Path):
    async def work(store: Store) -> None:
        await rule_table(store).put("kept", {}, "token")
        with limited(path.stat().st_size):
            with pytest.raises(StoreUnavailable):
                await rule_table(store).put("big", {"text": "x" * 1_000_000}, "token")
            assert not store.writable
            acknowledged = {row.name for row in await rule_table(store).rows()}
            assert not store.writable, "it is read, which says nothing about writing"
        while not store.writable:
            await asyncio.sleep(0.01)
        assert {row.name for row in await rule_table(store).rows()} == acknowledged >= {"kept"}
        await rule_table(store).put("after", {}, "token")

    with_store(path, work, heartbeat_seconds=0.02)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """File system of 1 MiB."""
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


def test_full_disk_is_named_and_free_space_resolves_it(small_disk: Path):
    async def work(store: Store) -> None:
        await rule_table(store).put("kept", {}, "token")
        ballast = fill(small_disk)
        with pytest.raises(StoreUnavailable) as refused:
            await rule_table(store).put("lost", {"text": "x" * 200_000}, "token")
        assert refused.value.full
        assert not store.writable
        ballast.unlink()
        while not store.writable:
            await asyncio.sleep(0.01)
        assert {row.name for row in await rule_table(store).rows()} == {"kept"}
        await rule_table(store).put("after", {}, "token")

    with_store(small_disk / "gpumond.db", work, heartbeat_seconds=0.02)


def test_store_that_cannot_be_opened_is_retried(tmp_path: Path):
    place = tmp_path / "place"
    place.write_text("a file where the directory should be")

    async def work(store: Store) -> None:
        assert not store.writable
        place.unlink()
        while not store.writable:
            await asyncio.sleep(0.01)
        await store.audit("token", "reload", {})

    with_store(place / "gpumond.db", work, heartbeat_seconds=0.02)
