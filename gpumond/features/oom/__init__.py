"""Cases of out-of-memory errors: what held the device, and what would have been enough."""

from __future__ import annotations

from gpumond.feature import Command, Feature

FEATURE = Feature(
    __name__,
    parts=("case_service:OomPart",),
    routes=("routes:router",),
    commands=(
        Command(
            "oom",
            "Problems",
            "list out-of-memory errors, and what would have prevented them",
            ("gpumond oom", "gpumond oom show 1790000000-4242-1", "gpumond oom show last --html oom.html"),
        ),
    ),
)
