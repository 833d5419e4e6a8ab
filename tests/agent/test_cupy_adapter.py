"""CuPy's adapter, and what is asked of the driver, over a stand-in libcuda that knows who made a context."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.agent.daemon import SECONDS, STANDINS, environment

PROGRAM = """
import ctypes, cupy
import gpumond.agent
from gpumond.agent import cuda
pool = cupy.get_default_memory_pool()
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of libcuda.so.1."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler (cc) to build the stand-in for libcuda")
    directory = tmp_path_factory.mktemp("libcuda")
    source, output = os.fspath(STANDINS / "libcuda.c"), os.fspath(directory / "libcuda.so.1")
    subprocess.run(["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", output, source], check=True)
    return directory


def run(code: str, library: Path, gpus: str) -> list[str]:
    """What a program prints on a machine with such GPUs."""
    environ = environment("/nowhere", STANDINS, LD_LIBRARY_PATH=os.fspath(library), FAKE_CUDA=gpus)
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=SECONDS)
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_the_driver_is_asked_only_if_the_program_has_loaded_it(library: Path) -> None:
    ask = "print(cuda.device_count(), cuda.has_context(0), cuda.device_uuid(0), cuda.contexts())"
    code = f"import ctypes; from gpumond.agent import cuda; {ask}; ctypes.CDLL('libcuda.so.1'); {ask}"
    uuid = "GPU-abababab-abab-abab-abab-ababababab00"
    assert run(code, library, "-c") == ["None None None []", f"2 False {uuid} [1]"]


def test_without_initialisation_nothing_is_known(library: Path) -> None:
    code = "import ctypes; from gpumond.agent import cuda; ctypes.CDLL('libcuda.so.1'); "
    assert run(code + "print(cuda.device_count(), cuda.contexts(), cuda.device_uuid(0))", library, "") == [
        "None [] None"
    ]


def test_a_slice_has_its_own_name(library: Path) -> None:
    code = "import ctypes; from gpumond.agent import cuda; ctypes.CDLL('libcuda.so.1'); print(cuda.device_uuid(0))"
    assert run(code, library, "s") == ["MIG-00ababab-abab-abab-abab-ababababab00"]


@pytest.mark.parametrize("chunks", [[5, 30, 7], [0, 30, 7], [5, 0, 0]])
def test_pools_of_devices_with_a_context_are_read(library: Path, chunks: list[int]) -> None:
    code = f"""{PROGRAM}
cupy.cuda.runtime.setDevice(1)
pool.chunks = {{1: {chunks}, 0: [1, 1, 1]}}
(usage,) = gpumond.agent.report()
print(usage.device_uuid[-1], usage.live_bytes, usage.held_bytes, usage.stranded_bytes)
print(usage.reclaimable)
print(cupy.cuda.runtime.getDevice(), cuda.contexts())
"""
    used, whole, split = chunks
    low = whole + split if not used else 0
    exactness = "exact" if low == whole + split else "interval"
    assert run(code, library, "---") == [
        f"1 {used} {used + whole + split} 0",
        f"Reclaimable(low={low}, likely={whole + split}, high={whole + split}, exactness='{exactness}')",
        "1 [1]",
    ]


def test_no_context_is_made_on_a_device_that_the_thread_has_but_does_not_use(library: Path) -> None:
    code = f"""{PROGRAM}
pool.chunks = {{2: [5, 30, 7]}}
(receipt,) = gpumond.agent.flush()
print(receipt.outcome, receipt.released_bytes, receipt.steps[0].step)
print(cupy.cuda.runtime.getDevice(), cuda.contexts())
"""
    assert run(code, library, "--c") == ["freed 30 cache", "0 [2]"]


def test_without_a_context_there_is_nothing_to_read_and_nothing_is_made(library: Path) -> None:
    code = f"{PROGRAM}\nprint(gpumond.agent.report(), gpumond.agent.flush()[0].reason, cuda.contexts())"
    assert run(code, library, "--") == ["() no device has a live CUDA context []"]


def test_another_pool_of_cupys_own_counts_too_and_a_strangers_does_not(library: Path) -> None:
    code = f"""{PROGRAM}
pool.chunks = {{0: [5, 0, 0]}}
other = cupy.cuda.MemoryAsyncPool()
other.chunks = {{0: [0, 20, 0]}}
cupy.cuda.set_allocator(other.malloc)
print([(u.live_bytes, u.held_bytes, u.reclaimable.low, u.reclaimable.likely) for u in gpumond.agent.report()])
cupy.cuda.set_allocator(lambda size: None)
print([(u.live_bytes, u.held_bytes) for u in gpumond.agent.report()])
"""
    assert run(code, library, "c") == ["[(5, 25, 0, 20)]", "[(5, 5)]"]
