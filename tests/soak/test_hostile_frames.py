"""Fuzzed messages of many users against a real daemon; bench.fuzz measures a million."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.soak.hostile_frames import send_fuzzed_messages

FRAMES = 200_000
GROWTH_MIB = 5.0


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_fuzzed_messages_affect_no_valid_agent_and_leave_no_memory_in_use():
    with tempfile.TemporaryDirectory() as directory:  # other users need access
        figures = send_fuzzed_messages(Path(directory), FRAMES)
    assert figures["frames"] >= FRAMES
    assert figures["tracebacks"] == 0
    assert figures["rss_growth_mib"] <= GROWTH_MIB, figures
