"""A few simulated hours of churn, rule edits and faults: bench.soak has the figures of seven days."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.week import live

DAYS = 0.4
"""Every kind of incident once."""
STORE_BYTES = 1 << 20
"""Little enough to be reached."""
LOG_MIB = 8.0
"""SQLite begins its log anew from 4 MiB on."""
GROWTH_MIB = 15.0
"""Growth of bounded data not yet full after three hours: the history's longest series, and label caches."""


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_whatever_happens_every_alert_comes_and_ends_and_no_other(tmp_path: Path):
    figures = live(tmp_path, DAYS, STORE_BYTES)
    assert figures["wrong"] == []
    due = figures["alerts_expected"] - figures["alerts_not_due_at_the_end"]
    assert figures["alerts_told"] == figures["alerts_raised"] == due > 15
    assert (figures["descriptors_more"], figures["threads_more"]) == (0, 0)
    assert STORE_BYTES / 2 < figures["store_mib_at_most"] * 2**20 <= 1.1 * STORE_BYTES
    assert figures["store_log_mib_at_most"] <= LOG_MIB
    assert figures["rss_mib_at_the_end"] - figures["rss_mib_after_3_hours"] <= GROWTH_MIB, figures
