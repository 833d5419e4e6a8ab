"""Fake for Warp: its devices on the fake driver. The public functions initialize Warp."""

from types import SimpleNamespace

from tests.agent.fakes.forbidden import forbidden

from ._src import context

__all__ = ["context"]
config = SimpleNamespace(version="1.19.0")
init, get_device, get_devices, get_cuda_devices, is_mempool_enabled, get_mempool_used_mem_current = map(
    forbidden,
    ("init", "get_device", "get_devices", "get_cuda_devices", "is_mempool_enabled", "get_mempool_used_mem_current"),
)
