"""Generator of known patterns of GPU memory use: plans from scenarios, and backends that execute them."""

from __future__ import annotations

from gpumond.feature import Command, Feature

FEATURE = Feature(
    __name__,
    commands=(
        Command(
            "loadgen",
            "Analysis",
            "generate a known pattern of memory use on a GPU",
            ("gpumond loadgen --list", "gpumond loadgen leak-linear --seed 1 --duration 5m"),
        ),
    ),
)
