"""``limit``: a soft quota on the program's own allocators."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from gpumond import agent
from gpumond.agent.loaded_allocators import ALLOCATORS, apply_limit
from gpumond.facts.program import AppliedLimit
from gpumond.sim.allocator import CachingAllocator
from gpumond.sim.device import MIB, OutOfMemory
from tests.helpers.agent_daemon import FAKES, environment
from tests.helpers.simulated import UUID

TORCH = """
import torch, gpumond.agent as agent
from torch.world import ACTIVE, Segment
from types import SimpleNamespace
GIB = 1 << 30
torch.WORLD.reset(devices=3, contexts={0, 2}, current=0, segments=[Segment([(GIB, ACTIVE)], device=2)])
fractions = {0: 0.9, 1: 1.0, 2: 1.0}
def set_fraction(fraction, device):
    assert device in torch.WORLD.contexts
    torch.WORLD.current = device  # as PyTorch does
    fractions[device] = fraction
torch._C._cuda_setMemoryFraction = set_fraction
torch._C._cuda_getMemoryFraction = fractions.__getitem__
named = torch.cuda.get_device_properties
torch.cuda.get_device_properties = lambda i: SimpleNamespace(uuid=named(i).uuid, total_memory=80 * GIB)
"""


def in_torch(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", TORCH + code],
        env=environment("/nowhere", FAKES),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    return done.stdout


def test_allocations_above_the_limit_flush_then_fail(allocator: CachingAllocator):
    allocator.free(allocator.malloc(300 * MIB))
    assert agent.limit(400 * MIB) == (AppliedLimit("sim", UUID, 400 * MIB, True),)
    allocator.malloc(350 * MIB)
    with pytest.raises(OutOfMemory, match="the limit is 400"):
        allocator.malloc(100 * MIB)
    assert agent.limit(None, UUID) == (AppliedLimit("sim", UUID, None, True),)
    allocator.malloc(100 * MIB)


def test_limits_of_unused_devices_are_refused_with_the_reason(allocator: CachingAllocator):
    (refused,) = agent.limit(MIB, "GPU-elsewhere")
    assert (refused.applied, refused.reason) == (
        False,
        "sim doesn't use this device yet; set the limit after its first allocation",
    )
    assert allocator.limit_bytes is None
    assert agent.limit(MIB, 0)[0].applied


def test_torch_is_limited_on_devices_with_a_context_and_keeps_its_current_device():
    out = in_torch("print(agent.limit(20 * GIB)); print(fractions, torch.WORLD.current, sorted(torch.WORLD.contexts))")
    applied, after = out.splitlines()
    assert applied.count("applied=True") == 2
    assert after == "{0: 0.25, 1: 1.0, 2: 0.25} 0 [0, 2]"


def test_torch_regains_the_programs_fraction_without_a_limit():
    out = in_torch("agent.limit(20 * GIB); agent.limit(30 * GIB, 0); agent.limit(None); print(fractions)")
    assert out == "{0: 0.9, 1: 1.0, 2: 1.0}\n"


def test_quota_raises_no_lower_fraction_of_the_program():
    out = in_torch("""
from gpumond.agent.loaded_allocators import ALLOCATORS, apply_limit
for size in (76, 60, None):
    apply_limit(size and size * GIB, None, "team")
    print(fractions, [(each.limit_bytes // GIB, each.quota) for each in ALLOCATORS.limits()])
""")
    assert out.splitlines() == [
        "{0: 0.9, 1: 1.0, 2: 0.95} [(72, ''), (76, 'team')]",
        "{0: 0.75, 1: 1.0, 2: 0.75} [(60, 'team'), (60, 'team')]",
        "{0: 0.9, 1: 1.0, 2: 1.0} [(72, '')]",
    ]


def test_own_limit_applies_below_and_after_a_quota(allocator: CachingAllocator):
    def limits() -> tuple[int | None, list[tuple[int, str]]]:
        return allocator.limit_bytes, [(each.limit_bytes, each.quota) for each in ALLOCATORS.limits()]

    agent.limit(200 * MIB)
    apply_limit(300 * MIB, None, "team")
    assert limits() == (200 * MIB, [(200 * MIB, "")])
    agent.limit(400 * MIB)
    apply_limit(300 * MIB, None, "team")
    assert limits() == (300 * MIB, [(300 * MIB, "team")])
    apply_limit(None, None, "team")
    assert limits() == (400 * MIB, [(400 * MIB, "")])
    agent.limit(None)
    apply_limit(300 * MIB, None, "team")
    apply_limit(None, None, "team")
    assert limits() == (None, [])


@pytest.mark.parametrize(
    ("world", "reason"),
    [
        ("initialized=False", "CUDA isn't initialized"),
        ("bad_fork=True", "forked"),
        ("backend='pluggable'", "not one of PyTorch"),
        ("contexts=set()", "no device has a live CUDA context"),
    ],
)
def test_torch_limit_is_refused_where_it_is_unsafe(world: str, reason: str):
    out = in_torch(f"torch.WORLD.reset({world}); print(agent.limit(GIB)); print(torch.WORLD.calls, fractions)")
    refused, after = out.splitlines()
    assert "applied=False" in refused
    assert reason in refused
    assert after == "[] {0: 0.9, 1: 1.0, 2: 1.0}"


def test_program_without_an_allocator_is_told_to_set_its_limit_later():
    code = "import gpumond.agent as agent; print(agent.limit(1 << 30))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment("/nowhere"), capture_output=True, text=True, timeout=60
    )
    assert "applied=False" in done.stdout
    assert "doesn't use a supported library yet; set the limit after its first allocation" in done.stdout


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: agent.limit("20GiB"), "limit: bytes: expected int"),
        (lambda: agent.limit(True), "limit: bytes: expected int"),
        (lambda: agent.limit(0), "limit: bytes must be at least 1"),
        (lambda: agent.limit(-1), "limit: bytes must be at least 1"),
        (lambda: agent.limit(1, 2.5), "limit: device: expected"),
    ],
)
def test_wrong_arguments_of_limit_are_named(call: Callable[[], object], says: str):
    with pytest.raises((TypeError, ValueError), match=says):
        call()
