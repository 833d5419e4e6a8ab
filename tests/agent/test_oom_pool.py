"""Memory for the last resort: its use is an error that is counted and recorded with the line of the main thread."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from gpumond import agent
from gpumond.agent.allocators import cuda
from gpumond.agent.measure.oom_pool import OomPools, OpenPool
from gpumond.agent.measure.oom_record import OOMS
from tests.helpers.values import make_pool


class Pool:
    used = 0

    def snapshot(self) -> list[dict[str, Any]]:
        return [{"allocated_size": self.used, "total_size": 2 << 20}]


@pytest.fixture
def ooms():
    OOMS._forget()
    yield OOMS
    OOMS._forget()


def test_each_use_is_counted_and_recorded_once(ooms):
    oom_pools, pool = OomPools(), Pool()
    oom_pools._open_pools.append(OpenPool(pool, "GPU-a"))
    torch_pool, other = make_pool(ooms=1), make_pool(allocator="cupy")
    oom_pools.record_uses()
    assert oom_pools.add_uses((torch_pool, other)) == (torch_pool, other)
    for used in (1 << 20, 2 << 20, 0, 1 << 20):
        pool.used = used
        oom_pools.record_uses()
    assert [each.ooms for each in oom_pools.add_uses((torch_pool, other))] == [3, None]
    first, second = ooms.recent()
    assert (first.seen, first.device_uuid, first.request_bytes) == ("oom_pool", "GPU-a", 1 << 20)
    assert any(call.file.endswith("test_oom_pool.py") for call in second.stack)


def test_nothing_is_reserved_without_pytorch_or_a_device():
    assert agent.oom_pool(1 << 20) == "PyTorch hasn't used a CUDA device yet"


def test_a_pytorch_without_such_pools_is_a_reason(monkeypatch: pytest.MonkeyPatch):
    def pool() -> None:
        raise AssertionError

    fake = SimpleNamespace(cuda=SimpleNamespace(current_device=lambda: 0, MemPool=pool))
    monkeypatch.setitem(sys.modules, "torch", fake)
    monkeypatch.setattr(cuda, "devices_with_context", lambda: [0])
    assert agent.oom_pool(1 << 20) == "this PyTorch has no MemPool(use_on_oom=True)"


@pytest.mark.parametrize(
    ("size", "device", "error"), [(0, None, ValueError), ("1", None, ValueError), (1, "0", TypeError)]
)
def test_wrong_arguments_are_errors(size: Any, device: Any, error: type[Exception]):
    with pytest.raises(error, match="oom_pool: "):
        agent.oom_pool(size, device)
