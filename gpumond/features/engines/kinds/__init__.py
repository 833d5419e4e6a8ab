"""Kinds of serving engines: one file each with an EngineSpec named SPEC, without I/O."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module

from gpumond.features.engines.spec import EngineSpec

KINDS = (
    "ollama",
    "comfyui",
    "llama_router",
    "triton",
    "a1111",
    "vllm",
    "sglang",
    "tensorrt_llm",
    "lmdeploy",
    "generic",
)
"""Names of the modules of this package that describe a kind."""


@cache
def all_kinds() -> Mapping[str, EngineSpec]:
    """Return each kind by its name in the configuration."""
    specs: list[EngineSpec] = [import_module(f"{__name__}.{name}").SPEC for name in KINDS]
    return {spec.kind: spec for spec in specs}
