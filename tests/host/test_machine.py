"""Starts of processes as times."""

from __future__ import annotations

import subprocess
import time

import pytest

from gpumond.facts.program import ProcessKey
from gpumond.host.machine import start_ticks, started_at


def test_start_of_a_process_is_a_unix_time():
    with subprocess.Popen(["sleep", "60"]) as process:
        assert started_at(ProcessKey(process.pid, start_ticks(process.pid))) == pytest.approx(time.time(), abs=5)
        process.kill()
    assert started_at(ProcessKey(process.pid, None)) is None
