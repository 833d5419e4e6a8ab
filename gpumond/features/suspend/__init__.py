"""Suspension of idle programs: their device memory moves to the host and back."""

from __future__ import annotations

from gpumond.feature import Command, Feature

FEATURE = Feature(
    name="suspend",
    parts=("gpumond.features.suspend.suspender:SuspendPart",),
    routes=("gpumond.features.suspend.routes:router",),
    commands=(
        Command(
            name="suspend",
            module="gpumond.features.suspend.command",
            help="move programs' GPU memory to the host and print receipts",
            group="Memory",
            examples=("gpumond suspend --workload notebook", "gpumond suspend --idle-for 1h --dry-run"),
        ),
        Command(
            name="resume",
            module="gpumond.features.suspend.command:Resume",
            help="move suspended programs' memory back to the GPU",
            group="Memory",
            examples=("gpumond resume --workload notebook", "gpumond resume --pid 4242 --wait 10m"),
        ),
    ),
)
