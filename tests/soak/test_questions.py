"""Many questions of Schemathesis to one daemon: tests/api/test_openapi_fuzz.py asks a few of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.scrape import rss
from tests.api import openapi_requests

EXAMPLES = 30
ROUNDS = 4
WARM_UP = 2
"""Rounds after which there are as many rules as there may be, and every path has been taken once."""
GROWTH_MIB = 5.0


@pytest.mark.soak
@pytest.mark.skipif(bool(openapi_requests.MISSING), reason=openapi_requests.MISSING)
@pytest.mark.timeout(3000)
def test_every_question_is_answered_as_documented_and_leaves_nothing_behind(tmp_path: Path):
    daemon = openapi_requests.demo(tmp_path)
    memory = []
    try:
        for seed in range(ROUNDS):
            openapi_requests.ask_all(daemon, tmp_path, EXAMPLES, seed)
            memory.append(rss(daemon.process.pid))
    finally:
        daemon.stop()
    assert memory[-1] - memory[WARM_UP - 1] <= GROWTH_MIB * 2**20, memory
