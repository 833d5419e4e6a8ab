"""Recorded logs: importers, `gpumond diagnose` and `gpumond record`."""

from __future__ import annotations

from gpumond.feature import Command, Feature

FEATURE = Feature(
    __name__,
    commands=(
        Command(
            "diagnose",
            "Analysis",
            "find leaks, fragmentation and crashes in your recorded log",
            ("gpumond diagnose smi.csv", "gpumond diagnose recording.jsonl --json"),
            module="diagnose",
        ),
        Command(
            "record",
            "Analysis",
            "record a daemon's readings for `gpumond diagnose`",
            ("gpumond record --out recording.jsonl --for 1h",),
            module="record",
        ),
    ),
)
