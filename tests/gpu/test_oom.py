"""On a card: borrowed memory rescues a call that a neighbor's cache makes fail; using an OOM pool is noticed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench import gpu_oom

pytestmark = pytest.mark.gpu

OOM_POOL = """
import time, torch, gpumond.agent as agent
agent.start()
torch.zeros(1, device="cuda")
assert agent.oom_pool(2 << 30) == ""
free, _ = torch.cuda.mem_get_info()
filled = torch.empty(free - (600 << 20), dtype=torch.uint8, device="cuda")
saved = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
from gpumond.agent.measure.oom_pool import OOM_POOLS
OOM_POOLS.check()
(oom,) = [each for each in agent.program().ooms if each.seen == "oom_pool"]
assert oom.request_bytes == 1 << 30, oom
"""


def test_a_failed_call_is_rescued_with_the_same_result():
    found = gpu_oom.rescues(2)
    assert (found["fails_without"], found["rescued"], found["equal"]) == (True, 2, True)


def test_the_use_of_an_oom_pool_is_recorded():
    done = subprocess.run([sys.executable, "-c", OOM_POOL], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
