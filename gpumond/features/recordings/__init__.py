"""Recorded logs: importers, `gpumond diagnose` and `gpumond record`."""

from __future__ import annotations

from gpumond.feature import Command, Feature

FEATURE = Feature(
    name="recordings",
    commands=(
        Command(
            name="diagnose",
            module="gpumond.features.recordings.diagnose",
            help="find leaks, fragmentation and crashes in your recorded log",
            group="Analysis",
            examples=(
                "gpumond diagnose smi.csv",
                "gpumond diagnose recording.jsonl --json",
            ),
        ),
        Command(
            name="record",
            module="gpumond.features.recordings.record",
            help="record the daemon's snapshots to a file, for `gpumond diagnose`",
            group="Analysis",
            examples=("gpumond record --out recording.jsonl --for 1h",),
        ),
    ),
)
