"""Allocators of a program: they are found once, and again after an import; the interface of their adapters."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from gpumond.agent.allocators import adapters
from gpumond.agent.allocators.adapters import ADAPTERS, AllocatorAdapter
from tests.agent.driver import run


def test_imported_library_is_known_at_once(library: Path) -> None:
    code = """
import torch
from gpumond.agent.loaded_allocators import ALLOCATORS
names = lambda: [adapter.name for adapter in ALLOCATORS.adapters()]
print(names(), ALLOCATORS.adapters() is ALLOCATORS.adapters(), end=" ")
import cupy
print(names())
"""
    assert run(code, library, "c") == ["['torch'] True ['torch', 'cupy']"]


def test_allocators_in_use_are_found_by_the_next_search(library: Path) -> None:
    code = """
import ctypes, time
driver = ctypes.CDLL("libcuda.so.1")
import gpumond.agent.allocators.cuda
from gpumond.agent import loaded_allocators
names = lambda: [adapter.name for adapter in loaded_allocators.ALLOCATORS.adapters()]
def use(reserved):
    driver.fake_pool(0, ctypes.c_uint64(reserved), ctypes.c_uint64(reserved), ctypes.c_uint64(0))
print(names(), end=" ")
use(64)
wait_seconds = loaded_allocators.ALLOCATORS._next_search_at - time.monotonic()
print(names(), wait_seconds <= loaded_allocators.SEARCH_INTERVAL_SECONDS, end=" ")
loaded_allocators.ALLOCATORS._next_search_at = time.monotonic()
print(names(), len(gpumond.agent.report()))
"""
    assert run(code, library, "c") == ["[] [] True ['mempool'] 1"]


def test_library_that_fails_once_is_found_by_the_next_search(library: Path) -> None:
    code = """
import time, torch
from gpumond.agent import loaded_allocators
names = lambda: [adapter.name for adapter in loaded_allocators.ALLOCATORS.adapters()]
graph = torch.cuda.CUDAGraph
del torch.cuda.CUDAGraph
print(names(), end=" ")
torch.cuda.CUDAGraph = graph
loaded_allocators.ALLOCATORS._next_search_at = time.monotonic()
print(names())
"""
    assert run(code, library, "c") == ["[] ['torch']"]


def test_thread_of_the_agent_does_not_end_captures(library: Path) -> None:
    code = """
import ctypes, threading
driver = ctypes.CDLL("libcuda.so.1")
from gpumond.agent.allocators import cuda
def ours():
    cuda.relax_thread_capture_mode()
    with cuda.relaxed_capture_mode():
        cuda.mempool_bytes(cuda.default_pool(0))
    cuda.mempool_bytes(cuda.default_pool(0))
thread = threading.Thread(target=ours)
thread.start(), thread.join()
print(driver.fake_spoiled(), end=" ")
with cuda.relaxed_capture_mode():
    cuda.mempool_bytes(cuda.default_pool(0))
print(driver.fake_spoiled(), end=" ")
cuda.mempool_bytes(cuda.default_pool(0))
print(driver.fake_spoiled() > 0)
"""
    assert run(code, library, "c") == ["0 0 True"]


CAPABILITIES = [
    value
    for value in vars(adapters).values()
    if getattr(value, "_is_runtime_protocol", False) and value.__module__ == adapters.__name__
]


def members(protocol: type) -> set[str]:
    return {name for name in {*vars(protocol), *protocol.__annotations__} if not name.startswith("_")}


def adapter_class(module: str) -> type:
    classes = vars(import_module(module)).values()
    (own,) = (
        value
        for value in classes
        if isinstance(value, type) and value.__module__ == module and AllocatorAdapter in value.__mro__
        if "name" in vars(value)
    )
    return own


@pytest.mark.parametrize("module", [spec.module for spec in ADAPTERS])
def test_adapters_declare_each_public_member(module: str) -> None:
    adapter = adapter_class(module)
    capabilities = [base for base in CAPABILITIES if base in adapter.__mro__]
    own = {name for name in vars(adapter) if not name.startswith("_")}
    declared = set().union(*map(members, capabilities))
    assert declared <= own
    assert own <= declared | members(AllocatorAdapter)
    assert own >= {"name", "read"}


def test_capabilities_of_adapters_are_found() -> None:
    assert len(CAPABILITIES) == 2
