"""Alerts after a tick: dispatch, queues and receivers."""

from __future__ import annotations

from gpumond.feature import Command, Feature

FEATURE = Feature(
    name="alerts",
    parts=("gpumond.features.alerts.dispatcher:AlertsPart",),
    routes=("gpumond.features.alerts.routes:router", "gpumond.features.alerts.routes:facts"),
    commands=(
        Command(
            name="alerts",
            module="gpumond.features.alerts.command",
            help="show active or past alerts",
            group="Problems",
            examples=(
                "gpumond alerts",
                "gpumond alerts --past",
            ),
        ),
    ),
)
