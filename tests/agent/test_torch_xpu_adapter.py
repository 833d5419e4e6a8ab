"""PyTorch adapter over a fake with the XPU functions, which fails on every call that could initialize it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpumond.agent.allocators import cuda, torch_xpu
from gpumond.agent.allocators.adapters import FlushRefused
from gpumond.agent.allocators.torch_xpu import XpuAdapter
from gpumond.devices.drm import drm_devices
from gpumond.facts.pools import Reclaimable
from tests.agent.fakes import torch
from tests.agent.fakes.torch.world import ACTIVE, FREE, MIB, PENDING, Segment
from tests.helpers.trees import SysTree

DEVICE, OTHER = "DRM-pci-0000:03:00.0", "DRM-pci-0000:05:00.0"


@pytest.fixture
def sysfs(tmp_path: Path) -> str:
    for address in ("0000:03:00.0", "0000:05:00.0"):
        (tmp_path / "bus/pci/devices" / address).mkdir(parents=True)
    return str(tmp_path)


@pytest.fixture
def world() -> Iterator[Any]:
    torch.WORLD.reset(segments=[Segment([(12 * MIB, ACTIVE), (8 * MIB, FREE)]), Segment([(40 * MIB, FREE)])])
    yield torch.WORLD
    assert not [call for call in torch.WORLD.calls if call.startswith("forbidden")]


@pytest.fixture
def adapter(world: Any, sysfs: str) -> XpuAdapter:
    return XpuAdapter(torch, sysfs)


def test_pool_is_live_and_cached_and_a_flush_returns_at_most_the_cache(adapter: XpuAdapter):
    (pool,) = adapter.read()
    assert (pool.allocator, pool.device_uuid, pool.live_bytes, pool.held_bytes) == ("torch", DEVICE, 12 * MIB, 60 * MIB)
    assert pool.reclaimable == Reclaimable(0, 48 * MIB, 48 * MIB, "interval")
    assert (pool.stranded_bytes, pool.ooms, pool.retries, pool.device_allocations) == (0, None, None, None)
    assert pool.live_allocations is None


def test_tiles_of_one_device_are_one_pool(world: Any, adapter: XpuAdapter):
    world.reset(segments=[Segment([(MIB << d, ACTIVE)], device=d) for d in range(3)], devices=4)
    assert {pool.device_uuid: pool.live_bytes for pool in adapter.read()} == {DEVICE: 3 * MIB, OTHER: 4 * MIB}


def test_flush_returns_bytes_within_its_bounds(world: Any, adapter: XpuAdapter):
    (pool,) = adapter.read()
    (result,) = adapter.flush(("gc", "ipc", "cache", "trim"))
    assert (result.step, result.released_bytes) == ("cache", 40 * MIB)
    assert pool.reclaimable.low <= result.released_bytes <= pool.reclaimable.high
    assert adapter.flush(("ipc",)) == ()
    assert world.calls == ["empty_cache"]


def test_torch_is_not_queried_before_xpu_is_initialized(world: Any, adapter: XpuAdapter):
    world.reset(initialized=False)
    assert adapter.read() == ()
    with pytest.raises(FlushRefused, match="isn't initialized"):
        adapter.flush(("cache",))
    assert world.calls == []


def test_forked_child_does_not_query_torch(world: Any, adapter: XpuAdapter):
    world.bad_fork = True
    assert adapter.read() == ()
    with pytest.raises(FlushRefused, match="forked"):
        adapter.flush(("cache",))


def test_flush_is_refused_during_a_capture(adapter: XpuAdapter):
    graph = torch.xpu.XPUGraph()
    graph.capture_begin()
    with pytest.raises(FlushRefused, match="captured"):
        adapter.flush(("cache",))
    graph.capture_end()
    assert adapter.flush(("cache",))
    assert not cuda.CAPTURING_GRAPHS


def test_pool_on_an_unknown_device_is_not_reported(world: Any, tmp_path: Path):
    assert XpuAdapter(torch, str(tmp_path / "elsewhere")).read() == ()


@pytest.mark.parametrize(("has_xpu", "present"), [(False, "TorchAdapter"), (True, "XpuAdapter")])
def test_build_of_torch_has_one_of_the_two_adapters(has_xpu: bool, present: str):
    program = (
        f"import torch; torch._C._has_xpu = {has_xpu}\n"
        "from gpumond.agent.allocators.adapters import ADAPTERS, adapter_if_imported\n"
        "present = filter(None, map(adapter_if_imported, ADAPTERS))\n"
        "print(*(type(adapter).__name__ for adapter in present if adapter.name == 'torch'))"
    )
    path = {"PYTHONPATH": os.pathsep.join((str(Path(__file__).with_name("fakes")), *sys.path))}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env={**os.environ, **path}, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [present]


def amd(uuid: str | None = None, **fields: Any) -> Any:
    return SimpleNamespace(uuid=uuid, **fields)


ASCII = b"18c7b1d4e2a63f10".hex()
PCI = {"pci_domain_id": 0, "pci_bus_id": 3, "pci_device_id": 0}


@pytest.mark.parametrize(
    ("properties", "shape", "uuid"),
    [
        (amd(f"{ASCII[:8]}-{ASCII[8:]}"), {}, "AMD-18c7b1d4e2a63f10"),
        (amd("58580000-0000-0000-0000-000000000000", **PCI), {}, "DRM-pci-0000:03:00.0"),
        (amd(None, **PCI), {"unique_id": "0x18c7b1d4e2a63f10"}, "AMD-18c7b1d4e2a63f10"),
        (amd("30" * 16, **PCI), {}, "DRM-pci-0000:03:00.0"),
        (amd("58580000-0000-0000-0000-000000000000"), {}, None),
        (amd(), {}, None),
    ],
)
def test_amd_device_has_the_daemons_name(tmp_path: Path, properties: Any, shape: dict[str, str], uuid: str | None):
    directory = tmp_path / "bus/pci/devices/0000:03:00.0"
    directory.mkdir(parents=True)
    for name, text in shape.items():
        (directory / name).write_text(f"{text}\n")
    assert torch_xpu.amd_device_uuid(properties, str(tmp_path)) == uuid


def test_agent_and_daemon_agree_on_a_device_name(tmp_path: Path):
    tree = SysTree(tmp_path)
    tree.amdgpu(pci="0000:03:00.0")
    (card,) = drm_devices(str(tmp_path))
    uuid = (card.unique_id or "").encode().hex()
    properties = amd(uuid, **PCI) if card.unique_id else amd(None, **PCI)
    assert torch_xpu.amd_device_uuid(properties, str(tmp_path)) == card.uuid


@pytest.mark.parametrize(
    ("uuid", "device_ids", "found"),
    [
        ("ff" * 16, [0x0BDA], "DRM-pci-0000:10:00.0"),  # an unusual vendor, and the only device of its model
        ("ff" * 16, [0x0BDA, 0x56A0], "DRM-pci-0000:10:00.0"),
        ("ff" * 16, [0x0BDA, 0x0BDA], None),
        ("ff" * 16, [0x56A0], None),
        ("", [0x0BDA], "DRM-pci-0000:10:00.0"),  # before PyTorch reported the UUID
        ("8680a05600000000" + "10" + "00" * 7, [0x0BDA], "DRM-pci-0000:10:00.0"),  # a UUID of another device
    ],
)
def test_intel_device_is_identified_if_its_model_is_unique(
    tmp_path: Path, uuid: str, device_ids: list[int], found: str | None
):
    for number, device_id in enumerate(device_ids):
        device = tmp_path / f"devices/0000:1{number}:00.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x8086\n")
        (device / "device").write_text(f"{device_id:#06x}\n")
        for node in (f"card{number}", f"renderD{128 + number}"):
            (tmp_path / "class/drm" / node).mkdir(parents=True)
            (tmp_path / "class/drm" / node / "device").symlink_to(device)
    assert torch_xpu.intel_device_uuid(SimpleNamespace(uuid=uuid, device_id=0x0BDA), str(tmp_path)) == found


def test_pending_blocks_are_in_the_cache(world: Any, sysfs: str):
    world.reset(segments=[Segment([(2 * MIB, PENDING)])])
    (pool,) = XpuAdapter(torch, sysfs).read()
    assert (pool.live_bytes, pool.reclaimable.high) == (0, 2 * MIB)
