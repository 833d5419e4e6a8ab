"""Serving engines that the configuration declares: their state, and the ways to release their memory.

A kind of engine is one file with an EngineSpec, without I/O. ``connection`` sends its requests, ``ownership`` finds the
processes of an engine, ``poller`` keeps the newest state of each, and ``flush_step`` releases memory.
"""

from __future__ import annotations

from gpumond.features.engines.kinds import (
    a1111,
    comfyui,
    generic,
    llama_router,
    lmdeploy,
    ollama,
    sglang,
    tensorrt_llm,
    triton,
    vllm,
)
from gpumond.features.engines.spec import EngineSpec

KINDS: tuple[EngineSpec, ...] = (
    ollama.SPEC,
    comfyui.SPEC,
    llama_router.SPEC,
    triton.SPEC,
    a1111.SPEC,
    vllm.SPEC,
    sglang.SPEC,
    tensorrt_llm.SPEC,
    lmdeploy.SPEC,
    generic.SPEC,
)
"""All kinds of engines."""


def spec_of(kind: str) -> EngineSpec:
    return next(spec for spec in KINDS if spec.kind == kind)
