"""Alerts after a tick: dispatch, queues and receivers."""

from __future__ import annotations

from gpumond.feature import Command, Feature

FEATURE = Feature(
    __name__,
    parts=("dispatcher:AlertsPart",),
    routes=("routes:router", "routes:facts"),
    commands=(
        Command("alerts", "Problems", "show active or past alerts", ("gpumond alerts", "gpumond alerts --past")),
    ),
)
