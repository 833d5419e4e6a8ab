"""Acknowledged changes survive kill -9 at random times."""

from __future__ import annotations

from pathlib import Path

from tests.fakenvml import FakeDriver
from tests.integration.killing import Killing

KILLS = 4


def test_killed_daemon_loses_no_rule_no_audit_entry_and_no_alert(tmp_path: Path, driver: FakeDriver):
    killing = Killing(tmp_path, driver)
    for _ in range(KILLS):
        killing.round()
    killing.end()
    assert killing.figures.acknowledged > 5 * KILLS
