"""The disk of the store hangs, or the store's directory is removed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from gpumond.facts.errors import StoreUnavailable
from gpumond.store.store import Store
from tests.helpers.opened_store import with_store
from tests.helpers.running import RunningDaemon, until

FREEZE = """
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>
static int synced(long number, int descriptor) {
    while (access(getenv("FROZEN"), F_OK) == 0)
        usleep(10000);
    return syscall(number, descriptor);
}
int fsync(int descriptor) { return synced(SYS_fsync, descriptor); }
int fdatasync(int descriptor) { return synced(SYS_fdatasync, descriptor); }
"""
"""Writes block while the file in FROZEN exists."""


@pytest.fixture
def library(tmp_path: Path) -> Path:
    source = tmp_path / "freeze.c"
    source.write_text(FREEZE)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "freeze.so", source], check=True)
    return tmp_path / "freeze.so"


@pytest.mark.needs("cc")
def test_sigterm_ends_a_daemon_with_a_hanging_disk(serve: Callable[..., RunningDaemon], library: Path, tmp_path: Path):
    frozen = tmp_path / "frozen"
    daemon = serve("--source", "sim", environ={"LD_PRELOAD": str(library), "FROZEN": str(frozen)})
    until(lambda: daemon.value("gpumond_store_writable") == 1)
    frozen.touch()
    until(lambda: daemon.healthy())
    assert daemon.stop() == 0
    assert frozen.exists()
    assert "doesn't respond; data that hasn't been written is lost" in daemon.log.read_text()


def test_second_daemon_does_not_share_a_store_with_a_removed_directory(path: Path):
    async def work(store: Store) -> None:
        await store.audit("token", "reload", {})
        shutil.rmtree(path.parent)
        second = Store(path)
        await second.open()
        assert second.writable
        with pytest.raises(StoreUnavailable, match="another daemon uses it"):
            await store.audit("token", "reload", {})
        await second.close()
        await store.audit("token", "reload", {})
        third = Store(path)
        await third.open()
        assert not third.writable
        await third.close()

    with_store(path, work, heartbeat_seconds=3600.0)
