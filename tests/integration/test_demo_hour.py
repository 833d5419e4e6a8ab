"""The demo lives: its alerts fire, resolve and fire again, its numbers move, and all faces agree. A quarter of an hour;
``python -m tests.integration.demo_hour`` takes a whole one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.browser import needs_chromium
from tests.integration.demo_hour import watch, wrong

MINUTES = 15

pytestmark = [needs_chromium, pytest.mark.soak, pytest.mark.timeout(60 * MINUTES + 300)]


def test_nothing_contradicts_itself_and_nothing_looks_dead(tmp_path: Path):
    assert watch(tmp_path, MINUTES)["wrong"] == []


def test_a_summary_of_a_dead_demo_is_not_well():
    dead = {"seconds": 900, "first_disagreements": ["page: used"], "page": {"complaints": ["an error"]}}
    dead |= {"alerts": {"leak": {"fired": 1}}, "flushes": {"outcomes": {}}}
    dead |= {"values": {"gpumond_device_power_watts": 1, "gpumond_device_memory_size_bytes": 1}}
    assert [found.partition(" ")[0] for found in wrong(dead)] == [
        "page:",
        "an",
        "leak",
        "leak",
        "fragmentation",
        "fragmentation",
        "flushes",
        "gpumond_device_power_watts",
    ]
