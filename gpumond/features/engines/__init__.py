"""Serving engines that the configuration declares, reached over HTTP."""

from __future__ import annotations

from gpumond.feature import Feature

FEATURE = Feature(
    name="engines",
    parts=("gpumond.features.engines.flush_step:EnginesPart",),
)
