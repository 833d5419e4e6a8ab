"""Fuzzed frames of many users against a real daemon: bench.fuzz has the figures of a million."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.soak.hostile_frames import siege

FRAMES = 200_000
GROWTH_MIB = 5.0


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_fuzzed_frames_hurt_nobody_and_leave_nothing_behind():
    with tempfile.TemporaryDirectory() as directory:  # other users have to get in
        figures = siege(Path(directory), FRAMES)
    assert figures["frames"] >= FRAMES
    assert figures["tracebacks"] == 0
    assert figures["rss_growth_mib"] <= GROWTH_MIB, figures
