"""Baselines: the recorded memory use of workloads, and its comparison."""

from __future__ import annotations

from gpumond.feature import Command, Feature

FEATURE = Feature(
    __name__,
    parts=("recorder:BaselinesPart",),
    routes=("routes:router",),
    commands=(
        Command(
            "baseline",
            "Analysis",
            "measure memory use and compare it after a change",
            (
                "gpumond baseline record before --workload train --for 10m",
                "gpumond baseline compare before --for 10m --fail-above 5%",
                "gpumond baseline list",
                "gpumond baseline delete before",
            ),
        ),
    ),
)
