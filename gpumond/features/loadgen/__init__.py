"""Generator of known patterns of GPU memory use: plans from scenarios, and backends that execute them."""

from __future__ import annotations

from gpumond.feature import Command, Feature

FEATURE = Feature(
    name="loadgen",
    commands=(
        Command(
            name="loadgen",
            module="gpumond.features.loadgen.command",
            help="generate a known memory usage pattern on a real or simulated GPU",
            group="Analysis",
            examples=("gpumond loadgen --list", "gpumond loadgen leak-linear --seed 1 --duration 5m"),
        ),
    ),
)
