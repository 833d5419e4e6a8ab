"""The audit of changes and flushes."""

from __future__ import annotations

from gpumond.feature import Command, Feature

FEATURE = Feature(
    __name__,
    routes=("routes:router",),
    commands=(
        Command(
            "audit",
            "Daemon",
            "show the audit log of changes and flushes, or verify it",
            ("gpumond audit", "gpumond audit verify --log collected.log"),
        ),
    ),
)
