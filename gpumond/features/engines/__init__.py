"""Serving engines that the configuration declares, reached over HTTP."""

from __future__ import annotations

from gpumond.feature import Feature

FEATURE = Feature(__name__, parts=("flush_step:EnginesPart",))
