"""A few simulated hours of churn, rule edits and faults; bench.soak measures seven days."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.week import run_week

DAYS = 0.4
"""Each kind of incident once."""
STORE_BYTES = 1 << 20
"""Small enough to be reached."""
LOG_MIB = 8.0
"""SQLite restarts its log at 4 MiB."""
GROWTH_MIB = 15.0
"""Growth of bounded data that is not full after three hours: the history's longest series, and label caches."""


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_expected_alerts_fire_and_resolve_and_no_others(tmp_path: Path):
    figures = run_week(tmp_path, DAYS, STORE_BYTES)
    assert figures["wrong"] == []
    due = figures["alerts_expected"] - figures["alerts_not_due_at_the_end"]
    assert figures["alerts_told"] == figures["alerts_raised"] == due > 15
    assert (figures["descriptors_more"], figures["threads_more"]) == (0, 0)
    assert STORE_BYTES / 2 < figures["store_mib_at_most"] * 2**20 <= 1.1 * STORE_BYTES
    assert figures["store_log_mib_at_most"] <= LOG_MIB
    assert figures["rss_mib_at_the_end"] - figures["rss_mib_after_3_hours"] <= GROWTH_MIB, figures
