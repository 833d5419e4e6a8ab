"""Fake for JAX (0.10): backends that the program has initialized, and the statistics of their devices."""

from __future__ import annotations

from forbidden import forbidden

from ._src import xla_bridge

__all__ = ["xla_bridge"]
__version__ = "0.10.2"

devices = forbidden("jax.devices")  # initializes the backend, which takes three quarters of the memory
local_devices = forbidden("jax.local_devices")
live_arrays = forbidden("jax.live_arrays")
clear_caches = forbidden("jax.clear_caches")
