"""Many requests of Schemathesis to one daemon; tests/serve/test_openapi_fuzz.py sends a few of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.scrape import rss
from tests.helpers import openapi_requests

EXAMPLES = 30
ROUNDS = 4
WARM_UP = 2
"""Rounds after which the number of rules is at its limit, and every path has been used once."""
GROWTH_MIB = 5.0


@pytest.mark.soak
@pytest.mark.skipif(bool(openapi_requests.MISSING), reason=openapi_requests.MISSING)
@pytest.mark.timeout(3000)
def test_responses_are_as_documented_and_memory_does_not_grow(tmp_path: Path):
    memory = []
    with openapi_requests.demo(tmp_path) as daemon:
        for seed in range(ROUNDS):
            openapi_requests.ask_all(daemon, tmp_path, EXAMPLES, seed)
            memory.append(rss(daemon.process.pid))
    assert memory[-1] - memory[WARM_UP - 1] <= GROWTH_MIB * 2**20, memory
