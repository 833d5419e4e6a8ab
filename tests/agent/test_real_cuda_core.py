"""The real cuda.core, if installed, on a machine without a device: the attributes that the adapter reads."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from tests.helpers.agent_daemon import SECONDS

try:
    MISSING = importlib.util.find_spec("cuda.core") is None
except ModuleNotFoundError:  # no package cuda at all
    MISSING = True

pytestmark = pytest.mark.skipif(MISSING, reason="needs cuda.core (pip install cuda-core)")


def run(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS)
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_library_that_is_only_imported_is_not_used() -> None:
    code = """
import cuda.core
from gpumond.agent import flush, report
from gpumond.agent.loaded_allocators import ALLOCATORS
print(report(), flush(), ALLOCATORS.adapters())
"""
    assert run(code) == ["() [] []"]


def test_resources_are_found_and_not_kept() -> None:
    code = """
from cuda.core import DeviceMemoryResource, PinnedMemoryResource
from gpumond.agent.allocators import cuda_core
resource, other = (kind.__new__(kind) for kind in (DeviceMemoryResource, PinnedMemoryResource))
cuda_core._search()
(found,) = cuda_core._resources
print(found() is resource, resource.is_handle_owned, resource.is_mapped, list(cuda_core._pools()))
try:
    resource.attributes  # a resource without a pool is as one that was closed
except RuntimeError as error:
    print(error)
del resource
print(found(), cuda_core.CudaCoreAdapter().framework().startswith("cuda.core 1."))
"""
    assert run(code) == ["True False False []", "DeviceMemoryResource has been closed", "None True"]
