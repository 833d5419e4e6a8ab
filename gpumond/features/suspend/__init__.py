"""Suspension of idle programs: their device memory moves to the host and back."""

from __future__ import annotations

from gpumond.feature import Command, Feature

FEATURE = Feature(
    __name__,
    parts=("suspender:SuspendPart",),
    routes=("routes:router",),
    commands=(
        Command(
            "suspend",
            "Memory",
            "move programs' GPU memory to the host and print receipts",
            ("gpumond suspend --workload notebook", "gpumond suspend --idle-for 1h --dry-run"),
        ),
        Command(
            "resume",
            "Memory",
            "move suspended programs' memory back to the GPU",
            ("gpumond resume --workload notebook", "gpumond resume --pid 4242 --wait 10m"),
            module="command:ResumeCommand",
        ),
    ),
)
