"""Quotas of processes, and requests for memory."""

from __future__ import annotations

from gpumond.feature import Feature

FEATURE = Feature(
    name="quotas",
    parts=(
        "gpumond.features.quotas.part:QuotasPart",
        "gpumond.features.quotas.part:AdmissionsPart",
        "gpumond.features.quotas.part:BorrowsPart",
    ),
    routes=(
        "gpumond.features.quotas.routes:router",
        "gpumond.features.quotas.admission_routes:router",
    ),
)
