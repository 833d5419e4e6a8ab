"""The real JAX, if it is installed. Its CPU backend shows that the agent initializes nothing and imports nothing."""

from __future__ import annotations

import importlib.util

import pytest

from gpumond.facts.messages import Report
from tests.helpers.agent_daemon import FakeDaemon, environment, finished, host

if importlib.util.find_spec("jax") is None:
    pytest.skip("needs JAX (pip install 'jax[cpu]')", allow_module_level=True)


def test_jax_without_a_gpu_has_no_pools_and_stays_uninitialized(daemon: FakeDaemon) -> None:
    code = """
import sys, jax
from jax._src import xla_bridge
before = set(sys.modules)
import gpumond.agent
gpumond.agent.start()
sys.stdin.read()
for use in (False, True):
    if use:
        x, before = jax.numpy.ones(1000).sum(), set(sys.modules)
    backends = sorted(xla_bridge._backends)
    receipts = gpumond.agent.flush(steps=["spill", "cache", "trim"])
    print([receipt.outcome for receipt in receipts if receipt.allocator == "jax"], gpumond.agent.report())
    print(bool(backends) == use, sorted(xla_bridge._backends) == backends)
    print([name for name in set(sys.modules) - before if name.startswith("jax")])
"""
    with host(code, environment(daemon.path, JAX_PLATFORMS="cpu"), "-W", "ignore") as process:
        framework = daemon.wait(lambda d: next((r.frameworks for r in d.received(Report) if r.frameworks), None))
        assert framework[0].startswith("jax 0.")
        assert finished(process) == 2 * "['nothing'] ()\nTrue True\n[]\n"
