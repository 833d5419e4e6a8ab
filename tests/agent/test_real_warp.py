"""The real Warp, if installed, on a machine without a device: it stays uninitialized."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from tests.helpers.agent_daemon import SECONDS

pytestmark = [
    pytest.mark.soak,  # its wheel has 150 MB, so the other tests run without it
    pytest.mark.skipif(importlib.util.find_spec("warp") is None, reason="needs Warp (pip install warp-lang)"),
]


def test_warp_is_not_initialized_and_has_the_attributes_that_the_adapter_reads() -> None:
    code = """
import warp
from gpumond.agent import flush, report
from gpumond.agent.allocators.warp import WarpAdapter
from gpumond.agent.loaded_allocators import ALLOCATORS
print(report(), flush(), ALLOCATORS.adapters(), warp._src.context.runtime, WarpAdapter().framework())
warp.init()
print(warp._src.context.runtime.cuda_devices, report())
(device,) = warp.get_devices()
print(device.captures, device.is_mempool_enabled, device.has_context, device.ordinal)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("() [] [] None warp 1."), done.stderr
    assert lines[-2:] == ["[] ()", "{} False False -1"]  # after Warp's greeting
