"""Quotas of processes, and requests for memory."""

from __future__ import annotations

from gpumond.feature import Command, Feature

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
    commands=(
        Command(
            name="queue",
            module="gpumond.features.quotas.command:Queue",
            help="show the programs waiting for memory",
            group="Memory",
            examples=("gpumond queue", "gpumond queue --json"),
        ),
        Command(
            name="quota",
            module="gpumond.features.quotas.command",
            help="show quotas, and the processes that they limit",
            group="Memory",
            examples=("gpumond quota", "gpumond quota --json"),
        ),
    ),
)
