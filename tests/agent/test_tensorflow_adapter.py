"""TensorFlow's eager context, over fakes for TensorFlow and the driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agent.driver import run

PROGRAM = """
import ctypes, os, tensorflow
from types import SimpleNamespace
ctypes.CDLL("libcuda.so.1")
context = tensorflow.context.context()
from gpumond.agent import flush, report
from gpumond.agent.allocators import cuda
from gpumond.agent.allocators.tensorflow import adapter
"""
SHOW = "print([(p.device_uuid[-1], p.live_bytes, p.peak_live_bytes, p.inside) for p in adapter().read()])"


def test_live_bytes_are_known_and_held_bytes_are_not(library: Path) -> None:
    code = f"""{PROGRAM}
context.initialize(1, {{"/device:GPU:0": (30, 50)}})
(pool,) = report()
print(pool.allocator, pool.live_bytes, pool.held_bytes, pool.held_known, pool.stranded_bytes, pool.peak_live_bytes)
print(pool.reclaimable)
(receipt,) = flush()
print(receipt.outcome, receipt.steps[0].detail)
"""
    assert run(code, library, "c") == [
        "tensorflow 30 30 False 0 50",
        "Reclaimable(low=0, likely=0, high=0, exactness='not_releasable')",
        "nothing tensorflow keeps its memory until the program exits",
    ]


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        pytest.param('2, {"/device:GPU:0": (1, 2), "/device:GPU:1": (3, 4)}', [(0, 1, 2), (1, 3, 4)], id="two"),
        pytest.param('2, {"/device:GPU:0": (1, 2)}, hidden=[0]', [(1, 1, 2)], id="one hidden"),
        pytest.param(
            '2, {"/device:GPU:0": (1, 2), "/device:GPU:1": (3, 4), "/device:GPU:2": (5, 6)}, split={0: 2}',
            [(0, 4, 6), (1, 5, 6)],
            id="one divided",
        ),
        pytest.param('2, {"/device:GPU:0": (1, 2)}', [], id="one left out by TensorFlow itself"),
    ],
)
def test_tensorflow_devices_are_identified(library: Path, layout: str, expected: list[tuple[int, ...]]) -> None:
    code = f"{PROGRAM}\ncontext.initialize({layout})\n{SHOW}\nprint(cuda.devices_with_context())"
    shown = [(str(ordinal), live, peak, None) for ordinal, live, peak in expected]
    assert run(code, library, "cc") == [repr(shown), "[0, 1]"]


def test_only_the_tasks_own_devices_count_in_a_cluster(library: Path) -> None:
    place = "/job:worker/replica:0/task:{}/device:GPU:0"
    code = f"""{PROGRAM}
context._collective_ops_server_def = SimpleNamespace(job_name="worker", task_index=1)
context.initialize(1, {{"{place.format(0)}": (1, 2), "{place.format(1)}": (3, 4)}})
{SHOW}
"""
    assert run(code, library, "c") == ["[('0', 3, 4, None)]"]


@pytest.mark.parametrize("gpus", ["", "-", "c"])
def test_tensorflow_is_not_initialized_before_its_use(library: Path, gpus: str) -> None:
    expected = list(range(gpus.count("c")))
    code = f"{PROGRAM}\nprint(adapter().read(), context._initialized, cuda.devices_with_context() == {expected})"
    assert run(code, library, gpus) == ["() False True"]


def test_device_without_a_context_is_not_queried(library: Path) -> None:
    code = f"{PROGRAM}\ncontext.initialize(1, {{'/device:GPU:0': (1, 2)}})\n{SHOW}\nprint(cuda.devices_with_context())"
    assert run(code, library, "-") == ["[]", "[]"]


def test_forked_child_does_not_query_tensorflow(library: Path) -> None:
    code = f"""{PROGRAM}
context.initialize(1, {{"/device:GPU:0": (30, 50)}})
print(len(report()), flush=True)
if os.fork() == 0:
    print(len(report()), flush=True)
    os._exit(0)
os.wait()
"""
    assert run(code, library, "c") == ["1", "0"]
