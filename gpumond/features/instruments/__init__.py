"""Instruments for one program: what its live memory consists of, snapshots and limits."""

from __future__ import annotations

from gpumond.feature import Command, Feature

FEATURE = Feature(
    name="instruments",
    parts=("gpumond.features.instruments.part:InstrumentsPart",),
    routes=("gpumond.features.instruments.routes:router",),
    commands=(
        Command(
            name="limit",
            module="gpumond.features.instruments.command:Limit",
            help="limit how much memory your program's allocators may hold",
            group="Memory",
            examples=(
                "gpumond limit --pid 4242 40GiB",
                "gpumond limit --workload train --device 0 none",
            ),
        ),
        Command(
            name="why",
            module="gpumond.features.instruments.command",
            help="show what your program's live memory consists of",
            group="Programs",
            examples=(
                "gpumond why --workload train",
                "gpumond why --pid 4242 --record 60s --folded sites.folded",
            ),
        ),
        Command(
            name="snapshot",
            module="gpumond.features.instruments.command:Snapshot",
            help="make your program write its framework's memory snapshot, and download it",
            group="Programs",
            examples=("gpumond snapshot --pid 4242 --out memory.pickle",),
        ),
    ),
)
