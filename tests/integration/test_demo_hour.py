"""The demo for a quarter of an hour: alerts fire and resolve repeatedly, values change, and all views agree.

``python -m tests.integration.demo_hour`` runs for an hour.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.browser import needs_chromium
from tests.integration.demo_hour import observe, wrong

MINUTES = 15

pytestmark = [needs_chromium, pytest.mark.soak, pytest.mark.timeout(60 * MINUTES + 300)]


def test_views_agree_and_values_change(tmp_path: Path):
    assert observe(tmp_path, MINUTES)["wrong"] == []


def test_summary_of_an_unchanging_demo_is_wrong():
    dead = {"seconds": 900, "first_disagreements": ["page: used"], "page": {"complaints": ["an error"]}}
    dead |= {"alerts": {"leak": {"fired": 1}}, "flushes": {"outcomes": {}}}
    dead |= {"values": {"gpumond_device_power_watts": 1, "gpumond_device_memory_size_bytes": 1}}
    assert [found.partition(" ")[0] for found in wrong(dead)] == [
        "page:",
        "an",
        "leak",
        "leak",
        "fragmentation",
        "flushes",
        "gpumond_device_power_watts",
    ]
