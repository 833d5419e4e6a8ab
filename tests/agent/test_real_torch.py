"""The real PyTorch, if it is installed. A build without CUDA shows that the agent initializes nothing."""

from __future__ import annotations

import importlib.util

import pytest

from gpumond.facts.messages import Report
from tests.helpers.agent_daemon import FakeDaemon, environment, finished, host

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs PyTorch", allow_module_level=True)


def test_pytorch_without_cuda_in_use_has_no_pools_and_stays_uninitialized(daemon: FakeDaemon) -> None:
    code = """
import sys, torch
before = set(sys.modules)
import gpumond.agent
gpumond.agent.start()
sys.stdin.read()
receipts = gpumond.agent.flush()
print([receipt.outcome for receipt in receipts], gpumond.agent.report(), torch.cuda.is_initialized())
print([name for name in set(sys.modules) - before if name.startswith("torch")])
"""
    with host(code, environment(daemon.path), "-W", "ignore") as process:  # PyTorch warns that NumPy is missing
        framework = daemon.wait(lambda d: next((r.frameworks for r in d.received(Report) if r.frameworks), None))
        assert framework[0].startswith("torch 2.")
        assert finished(process) == "['refused'] () False\n[]\n"
