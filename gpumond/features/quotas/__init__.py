"""Quotas of processes, and requests for memory."""

from __future__ import annotations

from gpumond.feature import Feature

FEATURE = Feature(
    name="quotas",
    routes=(
        "gpumond.features.quotas.routes",
        "gpumond.features.quotas.admission_routes",
    ),
)
