"""Verified flushes: plan, execute, verify, receipt."""

from __future__ import annotations

from gpumond.feature import Command, Feature

FEATURE = Feature(
    name="flush",
    parts=("gpumond.features.flush.flusher:FlushPart",),
    routes=(
        "gpumond.features.flush.routes:router",
        "gpumond.features.flush.routes:facts",
        "gpumond.features.flush.routes:hooks",
    ),
    commands=(
        Command(
            name="flush",
            module="gpumond.features.flush.command",
            help="make programs release cached memory and print receipts",
            group="Memory",
            examples=(
                "gpumond flush --workload train --dry-run",
                "gpumond flush --pid 4242",
                "gpumond flush --device 0 --step gc --step cache --min-reclaimable 1GiB",
            ),
        ),
        Command(
            name="receipts",
            module="gpumond.features.flush.command:Receipts",
            help="show the receipts of past flushes, suspensions and resumptions",
            group="Memory",
            examples=("gpumond receipts --limit 10",),
        ),
    ),
)
