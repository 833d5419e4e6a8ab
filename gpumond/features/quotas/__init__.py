"""Quotas of processes, and requests for memory."""

from __future__ import annotations

from gpumond.feature import Feature

FEATURE = Feature(
    name="quotas",
    parts=(
        "gpumond.features.quotas.quotas:QuotasPart",
        "gpumond.features.quotas.quotas:AdmissionsPart",
        "gpumond.features.quotas.quotas:BorrowsPart",
    ),
    routes=(
        "gpumond.features.quotas.routes:router",
        "gpumond.features.quotas.routes:admissions_router",
    ),
)
