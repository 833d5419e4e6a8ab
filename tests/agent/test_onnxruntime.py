"""The program of docs/how-to/onnxruntime.md: its function is called in a program whose agent reports no pool."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpumond.facts.messages import FlushCommand, FlushResult, Report
from tests.agent.driver import run
from tests.helpers.agent_daemon import FAKES, SECONDS, FakeDaemon, environment, finished, host

PAGE = Path(__file__).parents[2] / "docs/how-to/onnxruntime.md"
(SNIPPET,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
RUN = "run x {'memory.enable_memory_arena_shrinkage': 'gpu:0'}"


def test_function_is_called_once_and_never_by_a_plan(library: Path) -> None:
    code = f"""{SNIPPET}
for dry_run in (True, False):
    for receipt in gpumond.agent.flush(("gc", "hooks", "cache"), dry_run=dry_run):
        print(receipt.allocator, receipt.outcome, receipt.device_uuid, [step.detail for step in receipt.steps])
print(gpumond.agent.flush())
"""
    assert run(code, library, "c") == [
        "model.onnx CUDAExecutionProvider",
        "None planned None []",
        RUN,
        "None nothing None ['1 function reported 0 bytes']",
        "[]",
    ]


def test_error_of_the_function_is_the_reason(library: Path) -> None:
    code = """
import gpumond.agent
gpumond.agent.on_flush(lambda: 1 / 0)
print([(receipt.outcome, receipt.reason) for receipt in gpumond.agent.flush(("hooks",))])
"""
    assert run(code, library, "c") == ["[('failed', 'ZeroDivisionError: division by zero')]"]


def test_function_is_not_called_during_a_capture(library: Path) -> None:
    code = f"""{SNIPPET}
from gpumond.agent.allocators import cuda
graph = type("Graph", (), {{}})()
cuda.CAPTURING_GRAPHS.add(graph)
print([(receipt.outcome, receipt.reason) for receipt in gpumond.agent.flush(("hooks",))])
"""
    assert run(code, library, "c")[1:] == ["[('refused', 'a CUDA graph is being captured')]"]


@pytest.mark.parametrize(
    ("registered", "reason", "steps"),
    [(True, "", ["hooks"]), (False, "the agent reports no pool, and the program has no on_flush function", [])],
)
def test_daemon_can_request_it(daemon: FakeDaemon, registered: bool, reason: str, steps: list[str]) -> None:
    program = "import sys, gpumond.agent\ngpumond.agent.start()\nsys.stdin.read()"
    with host(f"{SNIPPET}{program}" if registered else program, environment(daemon.path, FAKES)) as process:
        daemon.wait_message(Report)
        daemon.wait_peer().send(FlushCommand("f1", "", ("hooks",)))
        result = daemon.wait_message(FlushResult)
        assert (result.outcome, result.reason, [step.step for step in result.steps]) == ("nothing", reason, steps)
        assert (RUN in finished(process)) == registered


def field(number: int, value: int | bytes) -> bytes:
    """Encode one field of a protocol buffer; numbers and lengths are below 128."""
    return bytes((number << 3, value)) if isinstance(value, int) else bytes((number << 3 | 2, len(value))) + value


def identity_model() -> bytes:
    """Return an ONNX model that copies ``x`` (1 by 4 numbers) to ``y``."""
    shape = b"".join(field(1, field(1, size)) for size in (1, 4))
    tensor = field(2, field(1, field(1, 1) + field(2, shape)))
    node = field(1, b"x") + field(2, b"y") + field(4, b"Identity")
    graph = field(1, node) + field(2, b"copy") + field(11, field(1, b"x") + tensor) + field(12, field(1, b"y") + tensor)
    return field(1, 8) + field(7, graph) + field(8, field(2, 17))


@pytest.mark.skipif(importlib.util.find_spec("onnxruntime") is None, reason="needs onnxruntime (pip install)")
def test_real_session_shrinks_the_arena_of_the_cpu(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(identity_model())
    code = SNIPPET.replace("CUDAExecutionProvider", "CPUExecutionProvider")
    show = "print([receipt.outcome for receipt in gpumond.agent.flush(('hooks',))])\n"
    found = []
    for device in ("cpu:0", "gpu:0"):  # an arena that does not exist is an error
        program = code.replace("gpu:0", device) + show
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        found += done.stdout.splitlines()
    assert found == ["['nothing']", "['failed']"]
