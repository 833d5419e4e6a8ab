"""The audit of changes and flushes."""

from __future__ import annotations

from gpumond.feature import Command, Feature

FEATURE = Feature(
    name="audit",
    routes=("gpumond.features.audit.routes:router",),
    commands=(
        Command(
            name="audit",
            module="gpumond.features.audit.command",
            help="show the audit log of changes and flushes, and compare it with the daemon's log",
            group="Daemon",
            examples=(
                "gpumond audit",
                "gpumond audit verify --log collected.log",
            ),
        ),
    ),
)
