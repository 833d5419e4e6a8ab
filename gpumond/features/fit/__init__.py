"""The memory that a program will need: from its earlier runs, and from one step under fake tensors."""

from __future__ import annotations

from gpumond.feature import Command, Feature

FEATURE = Feature(
    __name__,
    parts=("run_peaks:PeaksPart",),
    routes=("routes:router",),
    commands=(
        Command(
            "fit",
            "Programs",
            "estimate how much memory your PyTorch program needs",
            ("gpumond fit -- python train.py", "gpumond fit --batch 1..64 -- python train.py --batch-size {batch}"),
        ),
    ),
)
