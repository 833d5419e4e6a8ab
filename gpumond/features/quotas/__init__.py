"""Quotas of processes, and requests for memory."""

from __future__ import annotations

from gpumond.feature import Command, Feature

FEATURE = Feature(
    __name__,
    parts=("quotas:QuotasPart", "quotas:AdmissionsPart", "quotas:BorrowsPart"),
    routes=("routes:router", "routes:admissions_router"),
    commands=(
        Command(
            "queue",
            "Memory",
            "show the programs waiting for memory",
            ("gpumond queue", "gpumond queue --json"),
            module="command:QueueCommand",
        ),
        Command(
            "quota",
            "Memory",
            "show quotas, and the processes that they match",
            ("gpumond quota", "gpumond quota --json"),
        ),
    ),
)
