"""Generator of known patterns of GPU memory use: plans from scenarios, and engines that execute them."""

from __future__ import annotations

from gpumond.feature import Command, Feature

FEATURE = Feature(
    name="loadgen",
    commands=(
        Command(
            name="load",
            module="gpumond.features.loadgen.command",
            help="generate a known pattern of memory use on a device or a simulated device",
            group="Analysis",
            examples=(
                "gpumond load --list",
                "gpumond load leak-linear --seed 1 --duration 5m",
            ),
        ),
    ),
)
