"""Exits of other processes are reported once, and cost one descriptor each."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from gpumond.devices.process.procfs import ExitWatch
from tests.helpers.running import until


@contextmanager
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "3600"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_exit_is_reported_once_and_frees_its_descriptor() -> None:
    watch, before = ExitWatch(), len(os.listdir("/proc/self/fd"))
    with sleeper() as first, sleeper() as second:
        assert watch.add(first.pid)
        assert watch.add(second.pid)
        assert watch.add(second.pid)
        assert list(watch.exited()) == []
        first.kill()  # a zombie until it is waited for: its pid cannot be reused
        assert list(until(watch.exited)) == [first.pid]
        assert list(watch.exited()) == []
        watch.discard(second.pid)
        second.kill()
        second.wait()
        assert list(watch.exited()) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_ended_process_is_not_watched() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert not ExitWatch().add(ended.pid)


def test_watch_uses_no_more_descriptors_than_its_limit() -> None:
    watch = ExitWatch(limit=1)
    with sleeper() as first, sleeper() as second:
        assert watch.add(first.pid)
        assert not watch.add(second.pid)
        watch.discard(first.pid)
        assert watch.add(second.pid)
