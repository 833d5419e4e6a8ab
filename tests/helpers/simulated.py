"""Simulated device of 1 GiB in the process of the test, and an agent without state of other tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpumond.agent.measure.oom_record import OOMS
from gpumond.agent.measure.scopes import SCOPE_TOTALS
from gpumond.agent.measure.steps import STEPS
from gpumond.sim.allocator import CachingAllocator
from gpumond.sim.device import MIB, DeviceSpec, create

UUID = "GPU-simulated"


@pytest.fixture
def allocator(tmp_path: Path) -> Iterator[CachingAllocator]:
    """Allocator in use: its context has 24 MiB, and 1000 MiB are free."""
    for state in (SCOPE_TOTALS, STEPS, OOMS):
        state._forget()
    allocator = CachingAllocator(
        create(tmp_path / "card", DeviceSpec(UUID, 0, "sim", 1024 * MIB, context_bytes=24 * MIB))
    )
    allocator.free(allocator.malloc(20 * MIB))
    allocator.empty_cache()
    yield allocator
    allocator.close()
    for state in (SCOPE_TOTALS, STEPS, OOMS):
        state._forget()
