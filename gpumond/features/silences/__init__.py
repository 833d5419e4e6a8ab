"""Silences: alerts that are shown and not sent."""

from __future__ import annotations

from gpumond.feature import Command, Feature

FEATURE = Feature(
    __name__,
    parts=("silences:SilencesPart",),
    routes=("routes:router",),
    commands=(
        Command(
            "silence",
            "Problems",
            "silence alerts for a while; list and end silences",
            (
                "gpumond silence add rule=leak 'workload=~train.*' --for 1h --reason 'a known leak'",
                "gpumond silence list",
                "gpumond silence delete 6a6b4fcff3eb8457",
            ),
        ),
    ),
)
