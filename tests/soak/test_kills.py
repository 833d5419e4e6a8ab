"""Simulated hours with real sockets, hostile messages and kill -9; bench.survival measures days."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.kills import survive

DAYS = 0.4
"""Each kind of incident once."""


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_repeatedly_killed_daemon_sends_its_receiver_exactly_the_expected_alerts(tmp_path: Path):
    figures = survive(tmp_path, DAYS)
    assert figures["wrong"] == []
    due = figures["alerts_expected"] - figures["alerts_not_due_at_the_end"]
    assert figures["told_raised"] == due > 15
    assert figures["told_raised_again"] + figures["told_resolved_again"] <= figures["kills"] > 5
    assert figures["hostile_frames"] > 1000
    assert (figures["descriptors_more"], figures["threads_more"], figures["tracebacks"]) == (0, 0, 0)
