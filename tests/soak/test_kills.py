"""Simulated hours with real sockets, hostile frames and kill -9: bench.survival has the figures of days."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.kills import survive

DAYS = 0.4
"""Every kind of incident once."""


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_daemon_that_is_killed_again_and_again_tells_its_receiver_everything_and_nothing_else(tmp_path: Path):
    figures = survive(tmp_path, DAYS)
    assert figures["wrong"] == []
    due = figures["alerts_expected"] - figures["alerts_not_due_at_the_end"]
    assert figures["told_raised"] == due > 15
    assert figures["told_raised_again"] + figures["told_resolved_again"] <= figures["kills"] > 5
    assert figures["hostile_frames"] > 1000
    assert (figures["descriptors_more"], figures["threads_more"], figures["tracebacks"]) == (0, 0, 0)
