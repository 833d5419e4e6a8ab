"""Fake for TensorFlow (2.21): its eager context, and the device statistics of its C library."""

from __future__ import annotations

from types import SimpleNamespace

from forbidden import forbidden

from .python import _pywrap_tfe
from .python.eager import context

__all__ = ["_pywrap_tfe", "context"]
__version__ = "2.21.0"

config = SimpleNamespace(  # each of them initializes every GPU and takes its memory
    experimental=SimpleNamespace(get_memory_info=forbidden("tf.config.experimental.get_memory_info")),
    list_logical_devices=forbidden("tf.config.list_logical_devices"),
    list_physical_devices=forbidden("tf.config.list_physical_devices"),
)
