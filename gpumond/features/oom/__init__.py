"""Case files of out-of-memory errors: what held the device, and what would have been enough."""

from __future__ import annotations

from gpumond.feature import Command, Feature

FEATURE = Feature(
    name="oom",
    parts=("gpumond.features.oom.cases:OomPart",),
    routes=("gpumond.features.oom.routes:router",),
    commands=(
        Command(
            name="oom",
            module="gpumond.features.oom.command",
            help="list out-of-memory errors and show what would have prevented one",
            group="Problems",
            examples=("gpumond oom", "gpumond oom show 1790000000-4242-1", "gpumond oom show last --html oom.html"),
        ),
    ),
)
