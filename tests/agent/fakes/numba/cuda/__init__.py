from tests.agent.fakes.forbidden import forbidden

from .cudadrv import devices, driver

__all__ = ["devices", "driver"]
current_context, close, get_memory_info = map(forbidden, ("current_context", "close", "get_memory_info"))
