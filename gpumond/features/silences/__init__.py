"""Silences: alerts that are shown and not sent."""

from __future__ import annotations

from gpumond.feature import Command, Feature

FEATURE = Feature(
    name="silences",
    parts=("gpumond.features.silences.silences:SilencesPart",),
    routes=("gpumond.features.silences.routes:router",),
    commands=(
        Command(
            name="silence",
            module="gpumond.features.silences.command",
            help="silence alerts for a while, list your silences and end them",
            group="Problems",
            examples=(
                "gpumond silence add rule=leak 'workload=~train.*' --for 1h --reason 'a known leak'",
                "gpumond silence list",
                "gpumond silence delete 6a6b4fcff3eb8457",
            ),
        ),
    ),
)
