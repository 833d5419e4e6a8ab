"""Starts of processes as times, and their ends."""

from __future__ import annotations

import subprocess
import time

import pytest

from gpumond.facts.program import ProcessKey
from gpumond.host.machine import has_ended, read_start_ticks, started_at


def test_start_of_a_process_is_a_unix_time():
    with subprocess.Popen(["sleep", "60"]) as process:
        assert started_at(ProcessKey(process.pid, read_start_ticks(process.pid))) == pytest.approx(time.time(), abs=5)
        key = ProcessKey(process.pid, read_start_ticks(process.pid))
        assert not has_ended(key)
        process.kill()
    assert has_ended(key)
    assert not has_ended(ProcessKey(process.pid, None)), "it may be in another PID namespace"
    assert started_at(ProcessKey(process.pid, None)) is None
