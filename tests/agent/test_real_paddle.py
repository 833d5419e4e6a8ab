"""The real PaddlePaddle, if installed: a build without CUDA is not read, and has the functions that are called."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from tests.helpers.agent_daemon import SECONDS

pytestmark = [
    pytest.mark.soak,  # its wheel has 190 MB, so the other tests run without it
    pytest.mark.skipif(importlib.util.find_spec("paddle") is None, reason="needs Paddle (pip install paddlepaddle)"),
]


def test_build_without_cuda_is_not_read_and_has_the_functions_that_the_adapter_calls() -> None:
    code = """
import sys
import paddle
from gpumond.agent import flush, report
from gpumond.agent.allocators.paddle import PaddleAdapter, adapter
from gpumond.agent.loaded_allocators import ALLOCATORS
core = sys.modules["paddle.base.core"]
print(report(), flush(), ALLOCATORS.adapters(), adapter(), core.is_compiled_with_cuda())
tensor = paddle.ones([1024])
paddles = PaddleAdapter(paddle, core)
print([paddles._count(name, 0) for name in ("Allocated", "Reserved")], callable(paddle.device.cuda.empty_cache))
print(paddles.framework(), report())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS)
    first, counts, last = done.stdout.splitlines()[-3:]
    assert first == "() [] [] None False", done.stderr
    assert counts == "[0, 0] True"
    assert last.startswith("paddle 3.")
    assert last.endswith(" ()")
