from __future__ import annotations

import pytest

from gpumond.devices.drm import DrmClient, EngineTime, parse_client, utilization
from tests.helpers import trees
from tests.helpers.trees import MIB


@pytest.mark.parametrize(
    ("text", "driver", "engines"),
    [
        (trees.amdgpu(7, 60, total=90, busy=5), "amdgpu", {"gfx": EngineTime(5), "compute": EngineTime(0)}),
        (
            trees.i915(7, 60, busy=5),
            "i915",
            {
                "render": EngineTime(0),
                "copy": EngineTime(0),
                "video": EngineTime(0, None, 2),
                "video-enhance": EngineTime(0),
                "compute": EngineTime(5, None, 4),
            },
        ),
        (trees.xe(7, 60, busy=5, cycles=9), "xe", {"rcs": EngineTime(0, 9), "ccs": EngineTime(5, 9, 4)}),
    ],
)
def test_resident_memory_counts(text, driver, engines):
    entry = parse_client(text)
    assert entry is not None
    assert (entry.id, entry.driver, entry.used_bytes, entry.engines) == (7, driver, 60 * MIB, engines)


@pytest.mark.parametrize(
    ("lines", "used"),
    [
        ("drm-memory-vram:\t12 KiB", 12 * 1024),
        ("drm-total-vram0: 3 MiB\ndrm-total-vram1: 4 MiB", 7 * MIB),
        ("drm-memory-vram: 8 MiB\ndrm-resident-vram: 5 MiB\ndrm-total-vram: 9 MiB", 5 * MIB),
        ("drm-resident-vram0: 4096", 4096),
        ("drm-total-gtt: 5 MiB\ndrm-resident-system0: 4 MiB\ndrm-memory-cpu: 1 KiB", None),
        ("drm-resident-vram0: 5 KB", None),
        ("drm-resident-vram0: -1 KiB", None),
        ("drm-resident-vram0: 9223372036854775808", None),
        ("drm-resident-vram0:", None),
        ("", None),
    ],
)
def test_device_memory_is_counted_in_each_spelling_without_host_memory(lines, used):
    entry = parse_client(f"drm-driver: x\ndrm-client-id: 1\n{lines}\n")
    assert entry is not None
    assert entry.used_bytes == used


@pytest.mark.parametrize(
    "text", ["", "pos:\t0\nflags:\t02\n", "drm-driver:\tamdgpu\ndrm-memory-vram:\t5 KiB\n", "\x00\xff::\n:"]
)
def test_client_without_id_is_ignored(text):
    assert parse_client(text) is None


def made(busy: int, total: int | None = None, capacity: int = 1) -> DrmClient:
    return DrmClient(1, "x", None, None, {"render": EngineTime(busy, total, capacity)})


@pytest.mark.parametrize(
    ("before", "now", "share"),
    [
        ({1: made(0)}, {1: made(500_000_000)}, 0.25),
        ({1: made(0, capacity=2)}, {1: made(1_000_000_000, capacity=2)}, 0.25),
        ({1: made(10, 100)}, {1: made(40, 200)}, 0.3),
        ({1: made(0), 2: made(0)}, {1: made(500_000_000), 2: made(1_000_000_000)}, 0.75),
        ({1: made(0)}, {1: made(9_000_000_000)}, 1.0),
        ({1: made(500)}, {1: made(400)}, 0.0),
        ({1: made(10, 100)}, {1: made(40, 100)}, 0.0),
        ({}, {1: made(900_000_000)}, 0.0),
        ({}, {}, 0.0),
    ],
)
def test_utilization_is_the_busiest_engine_between_two_readings(before, now, share):
    assert utilization(before, now, seconds=2.0) == pytest.approx(share)
