"""Baselines: the recorded memory use of workloads, and its comparison."""

from __future__ import annotations

from gpumond.feature import Command, Feature

FEATURE = Feature(
    name="baselines",
    parts=("gpumond.features.baselines.recordings:BaselinesPart",),
    routes=("gpumond.features.baselines.routes:router",),
    commands=(
        Command(
            name="baseline",
            module="gpumond.features.baselines.command",
            help="measure memory usage and compare it after a change",
            group="Analysis",
            examples=(
                "gpumond baseline record before --workload train --for 10m",
                "gpumond baseline compare before --for 10m --fail-above 5%",
                "gpumond baseline list",
                "gpumond baseline delete before",
            ),
        ),
    ),
)
