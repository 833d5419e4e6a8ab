"""Lines that keep memory: five programs with the real PyTorch that leak tensors in host memory, in a process each.

They are forks of one process that has imported PyTorch, which takes seconds.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpumond.agent import retainers as referrers
from gpumond.agent.allocators.adapters import TrackedTensor
from gpumond.agent.requests import RequestHandler
from gpumond.agent.retainers import RetentionSearch
from gpumond.agent.settings import AgentSettings
from gpumond.facts.messages import AgentRequest
from gpumond.sim.allocator import CachingAllocator
from tests.helpers.agent_daemon import environment

LEAKS = Path(__file__).with_name("leaks")
VARIABLES = {
    "losses": "losses",
    "hook": "saved",
    "cache": "Embeddings.entries",
    "traceback": "batch",
    "native": "state",
}
RUN = """
import os, runpy, sys, torch
sys.path.insert(0, os.path.dirname(sys.argv[1]))
for file in sys.argv[1:]:
    if not os.fork():
        runpy.run_path(file, run_name="__main__")
        sys.exit()
    assert os.wait()[1] == 0
"""


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")
def test_line_that_leaks_is_named():
    files = [LEAKS / f"leak_{name}.py" for name in VARIABLES]
    command = [sys.executable, "-W", "ignore", "-c", RUN, *map(str, files)]
    done = subprocess.run(command, env=environment("/nowhere"), capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    for file, variable, line in zip(files, VARIABLES.values(), done.stdout.splitlines(), strict=True):
        found, *_ = json.loads(line)
        lines = [number for number, text in enumerate(file.read_text().splitlines(), 1) if "# leak" in text]
        assert (found["file"], found["name"]) == (str(file), variable)
        assert found["line"] in lines
        assert found["size_bytes"] >= 10 * 64 * 256 * 4
        assert found["tensors"] >= 10


class Tensor:
    """Stands for a tensor: an object that can be referred to weakly."""


@pytest.fixture
def tensors() -> list[Any]:
    gc.collect()
    return []


def search(alive: Callable[[], list[Any]]) -> RetentionSearch:
    return RetentionSearch(lambda: [TrackedTensor(tensor, 100, False) for tensor in alive()])


class Pool:
    """Objects of a program, which the search reaches through weak references."""

    def __init__(self) -> None:
        self.references: list[weakref.ref[Any]] = []
        self.kept: list[Any] = []

    def create(self, keep: bool) -> None:
        tensor = Tensor()
        self.references.append(weakref.ref(tensor))
        if keep:
            self.kept.append(tensor)

    def alive(self) -> list[Any]:
        return [tensor for reference in self.references if (tensor := reference()) is not None]


def test_only_objects_that_survive_an_interval_are_kept():
    pool = Pool()
    for _ in range(10):
        pool.create(keep=True)
    searching = search(pool.alive)
    for number in range(20):
        pool.create(keep=number % 2 == 0)
    assert searching.advance() is None
    for _ in range(5):
        pool.create(keep=True)
    (found,) = searching.advance() or ()
    assert (found.name, found.tensors, found.size_bytes) == ("Pool.kept", 10, 1000)
    assert "self.kept.append" in Path(found.file).read_text().splitlines()[found.line - 1]


def test_program_without_growth_has_no_retainer():
    pool = Pool()
    for _ in range(10):
        pool.create(keep=True)
    searching = search(pool.alive)
    pool.create(keep=False)
    assert searching.advance() is None
    assert searching.advance() == ()


def test_search_keeps_no_object():
    pool = Pool()
    searching = search(pool.alive)
    pool.create(keep=True)
    searching.advance()
    assert searching.advance()
    reference = pool.references[0]
    gc.disable()
    try:
        pool.kept.clear()
        assert reference() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("count", [1, 10, 25])
def test_tuple_that_another_thread_builds_is_not_referred_to(count: int):
    """Its ``tuple(iterable)`` would fail."""
    tensor, is_started, is_searched = Tensor(), threading.Event(), threading.Event()

    def tensors() -> Iterator[Tensor]:
        yield from [tensor] * count
        is_started.set()
        is_searched.wait()
        yield tensor

    built: list[tuple[Tensor, ...]] = []
    thread = threading.Thread(target=lambda: built.append(tuple(tensors())))
    thread.start()
    is_started.wait()
    found = referrers.finished_referrers(tensor)
    is_searched.set()
    thread.join()
    assert [len(each) for each in built] == [count + 1]
    assert tuple not in map(type, found)
    assert built[0] in referrers.finished_referrers(tensor)


@pytest.mark.parametrize("file", ["/home/a/train.py", "/venv/lib/python3/site-packages/gpumond/sim/programs.py"])
def test_variables_of_running_functions_are_found_and_not_kept(file: str):
    ready, over = threading.Event(), threading.Event()
    references: list[weakref.ref[Any]] = []

    def work() -> None:
        kept = [Tensor()]
        references.append(weakref.ref(kept[0]))
        ready.set()
        over.wait()
        kept.clear()
        freed.set()
        over.clear()
        over.wait()

    work.__code__ = work.__code__.replace(co_filename=file)
    freed = threading.Event()
    thread = threading.Thread(target=work)
    thread.start()
    ready.wait()
    tensor = references[0]()
    (place,) = referrers.retaining_locations([tensor])
    del tensor
    over.set()
    freed.wait()
    alive = references[0]()
    over.set()
    thread.join()
    assert alive is None
    assert place is not None
    assert place.name == "kept"
    assert place.function.endswith("work")


def test_search_is_refused_by_a_program_that_does_not_allow_it(allocator: CachingAllocator):
    settings, request = AgentSettings([], []), AgentRequest("x", "retainers")
    handler = RequestHandler(settings)
    for settings.flush_policy in ("step", "never"):
        assert f"flush_policy is {settings.flush_policy}" in handler.start_search(request).reason
    settings.flush_policy = "allow"
    assert handler.start_search(request).reason == ""
    handler.continue_search(1e12)
    assert handler.retainers == ()
