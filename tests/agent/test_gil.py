"""Tensors are read only while no other thread of the program changes them."""

from __future__ import annotations

import gc
import importlib.util
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gpumond.agent.allocators.adapters import TensorsBusy
from gpumond.agent.allocators.gil import tensors_unchanged
from tests.helpers.agent_daemon import SECONDS, environment

RESET_GRADIENTS = """
import threading, time, weakref
import torch
from gpumond.agent.allocators import torch_live_classes
from gpumond.agent.allocators.adapters import TensorsBusy
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(10)))
end, visits = time.monotonic() + 3, 0

def visit():
    global visits
    while time.monotonic() < end or not visits:
        try:
            torch_live_classes.measure_classes(torch, "cpu", 0.2)
            visits += 1
        except TensorsBusy:
            pass
        time.sleep(0.001)

visitor = threading.Thread(target=visit)
visitor.start()
while visitor.is_alive():
    model(torch.ones(8, 64)).sum().backward()
    for parameter in model.parameters():
        freed = weakref.ref(parameter.grad, lambda _: time.sleep(0.001))  # another thread runs while it is freed
        parameter.grad = None
print(visits > 0)
"""


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")
def test_program_that_resets_gradients_survives_a_visit() -> None:
    command = [sys.executable, "-W", "ignore", "-c", RESET_GRADIENTS]
    ended = subprocess.run(
        command, env=environment("/nowhere"), capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "True\n"), ended.stderr[-2000:]


def test_no_object_is_read_without_the_gil() -> None:
    """Such a Python answers like this; it isn't installed where these tests run."""
    program = """
import sys
sys._is_gil_enabled = lambda: False
from gpumond.agent.allocators.adapters import TensorsBusy
from gpumond.agent.allocators.gil import tensors_unchanged
from gpumond.agent.retainers import finished_referrers
for read in (lambda: tensors_unchanged(0).__enter__(), lambda: finished_referrers(sys)):
    try:
        read()
    except TensorsBusy as busy:
        print(str(busy).partition(",")[0])
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=SECONDS, check=True)
    assert ended.stdout == 2 * "this Python runs without the GIL\n"


class Engine:
    """Waits in a method with the name of PyTorch's."""

    def __init__(self) -> None:
        self.started, self.ended = threading.Event(), threading.Event()

    def run_backward(self) -> None:
        self.started.set()
        self.ended.wait()


class Parameter:
    """Frees its gradient before the reference is cleared, as PyTorch's do."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def grad(self) -> None:
        return None

    @grad.setter
    def grad(self, value: None) -> None:
        self._engine.started.set()
        self._engine.ended.wait()


def backward(engine: Engine) -> None:
    engine.run_backward()


def reset(engine: Engine) -> None:
    Parameter(engine).grad = None


@contextmanager
def running(target: object, engine: Engine) -> Iterator[None]:
    thread = threading.Thread(target=target, args=(engine,))  # type: ignore[arg-type]
    thread.start()
    assert engine.started.wait(SECONDS)
    try:
        yield
    finally:
        engine.ended.set()
        thread.join()


@pytest.mark.parametrize("target", [backward, reset])
def test_gradients_are_not_read_while_a_thread_changes_them(target: object) -> None:
    before, engine = (sys.getswitchinterval(), gc.isenabled()), Engine()
    with running(target, engine):
        with pytest.raises(TensorsBusy, match="try again"), tensors_unchanged(0.01):
            raise AssertionError("a thread changes a gradient")
        assert (sys.getswitchinterval(), gc.isenabled()) == before
        threading.Timer(0.05, engine.ended.set).start()
        with tensors_unchanged():
            assert engine.ended.is_set()
    assert (sys.getswitchinterval(), gc.isenabled()) == before


def test_no_other_thread_runs_in_a_pause() -> None:
    counts, ended = [0], threading.Event()

    def count() -> None:
        while not ended.is_set():
            counts[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    try:
        for _ in range(3):
            with tensors_unchanged():
                first = counts[0]
                sum(range(2_000_000))  # several times the usual switch interval
                assert counts[0] == first
    finally:
        ended.set()
        thread.join()
