"""The memory that a program will need: from its earlier runs, and from one step under fake tensors."""

from __future__ import annotations

from gpumond.feature import Command, Feature

FEATURE = Feature(
    name="fit",
    parts=("gpumond.features.fit.part:PeaksPart",),
    routes=("gpumond.features.fit.routes:router",),
    commands=(
        Command(
            name="fit",
            module="gpumond.features.fit.command",
            help="estimate how much memory your PyTorch program needs, without a GPU",
            group="Programs",
            examples=(
                "gpumond fit -- python train.py",
                "gpumond fit --batch 1..64 -- python train.py --batch-size {batch}",
            ),
        ),
    ),
)
